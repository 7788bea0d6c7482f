"""Latent attention in the one native call of a decoder: what it computes beside the layers' own code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.attention.batches import prefill_batch
from eagle_server.attention.interface import Causal, Layout
from eagle_server.attention.torch_native import torch_native
from eagle_server.engine.assembly.pools import make_pool
from eagle_server.models.layers import pack_linears
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.native.decoder import LatentWeights
from eagle_server.ops.native.library import available
from tests.support.deepseek import DEEPSEEK, random_pair

CPU = torch.device("cpu")
LENGTH = 300  # more rows than a tile of a product has
CASES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {},
    "DeepSeek-V2-Lite": {
        **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None},
        **{"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
    },
    "MiniCPM3": {
        **{"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "n_routed_experts": None},
        **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 24},
    },
    "no multiple of a vector": {"kv_lora_rank": 20, "v_head_dim": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    "YaRN": {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, "mscale": 1.0}},
}

pytestmark = pytest.mark.skipif(
    not available(CPU, torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


def made(case: str, dtype: torch.dtype = torch.float32) -> TargetModel:
    target, _ = random_pair(base=DEEPSEEK | CASES[case], num_nextn_predict_layers=0)
    target = target.to(dtype)
    pack_linears(target)
    assert target.is_fused
    return target


def tokens_of(seed: int) -> Tensor:
    return torch.randint(1, 60, (LENGTH,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def prefill(target: TargetModel, chunks: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Tensor]:
    """The hidden states of texts by seed. Each chunk has some rows of each text."""
    slots = len(seeds) * LENGTH + 1
    pool = make_pool(target.config, slots, CPU)
    attention, outputs = torch_native(pool), [list[Tensor]() for _ in seeds]
    table = 1 + torch.randperm(slots - 1, generator=torch.Generator().manual_seed(9)).int().view(len(seeds), -1)
    ends = [list(accumulate((rows[i] for rows in chunks), initial=0)) for i in range(len(seeds))]
    for step in range(len(chunks)):
        spans = [(own[step], own[step + 1]) for own in ends]
        layout = Layout(tuple(b - a for a, b in spans), tuple(b for _, b in spans))
        kv_lens = torch.tensor([b for _, b in spans])
        batch = prefill_batch(torch.arange(len(seeds)), kv_lens, table, Causal(), layout)
        tokens = torch.cat([tokens_of(seed)[a:b] for seed, (a, b) in zip(seeds, spans, strict=True)])
        positions = torch.cat([torch.arange(a, b) for a, b in spans])
        hidden = target(tokens, positions, attention.plan(layout).bind(batch)).hidden
        for own, part in zip(outputs, hidden.split([b - a for a, b in spans]), strict=True):
            own.append(part)
    return [torch.cat(own) for own in outputs]


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_layers_compute_one_by_one(case: str) -> None:
    target = made(case)
    at_once = prefill(target, [(LENGTH,)], [0])[0]
    target._native = None
    torch.testing.assert_close(prefill(target, [(LENGTH,)], [0])[0], at_once, atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(case: str, dtype: torch.dtype) -> None:
    target = made(case, dtype)
    (alone,) = prefill(target, [(LENGTH,)], [0])
    (by_pieces,) = prefill(target, [(150,), (1,), (1,), (7,), (LENGTH - 159,)], [0])
    assert torch.equal(by_pieces, alone)
    beside = prefill(target, [(5, 200), (LENGTH - 5, LENGTH - 200)], [0, 1])
    assert torch.equal(beside[0], alone)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_near_float32(case: str) -> None:
    rounded, exact = prefill(made(case, torch.bfloat16), [(60,)], [0])[0], prefill(made(case), [(60,)], [0])[0]
    error = (rounded.float() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.median() < 0.05  # rounded routers choose other experts in some rows


def test_each_head_has_whole_groups_of_outputs() -> None:
    weights = torch.randn(3, 10, 7, generator=torch.Generator().manual_seed(0))
    packed = LatentWeights.by_head(weights).dense().view(3, 16, 7)
    assert torch.equal(packed[:, :10], weights)
    assert not packed[:, 10:].any()
