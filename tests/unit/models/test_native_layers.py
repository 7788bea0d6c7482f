"""One native call over layers that attend and recurrent ones: what it computes beside the layers' own code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.attention.batches import prefill_batch
from eagle_server.attention.interface import Causal, Layout
from eagle_server.attention.recurrent import PromptRows
from eagle_server.attention.torch_native import torch_native
from eagle_server.cache.states import StatePool
from eagle_server.engine.assembly.pools import make_pool
from eagle_server.models.layers import pack_linears
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.native.library import available
from tests.support.hybrids import hybrid_target

CPU = torch.device("cpu")
TOKENS = torch.randint(1, 24, (40,), generator=torch.Generator().manual_seed(0))
SHARED = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 40}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, **SHARED}
TARGETS: dict[str, dict[str, Any]] = {
    "Qwen3.5": {},
    "Qwen3-Next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **EXPERTS},
    "LFM2": {"kind": "lfm2"},
    "LFM2-MoE": {"kind": "lfm2", "architectures": ["Lfm2MoeForCausalLM"], "num_dense_layers": 1, **EXPERTS},
    "Granite 4": {"kind": "granite"},
    "Granite 4 with experts": {"kind": "granite", "num_local_experts": 5, "num_experts_per_tok": 2},
    "Nemotron-H": {"kind": "nemotron"},
    "Nemotron-H with narrow experts": {"kind": "nemotron", "moe_latent_size": 24},
    "Bamba": {"kind": "bamba"},
    "Kimi Linear": {"kind": "kimi"},
}

pytestmark = pytest.mark.skipif(
    not available(CPU, torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> TargetModel:
    model = hybrid_target(**TARGETS[request.param])
    pack_linears(model)
    assert model.is_fused
    return model


def states_of(target: TargetModel) -> StatePool:
    recurrent = target.config.recurrent
    assert recurrent is not None
    pool = StatePool(len(target.config.recurrent_layers), 1, 1, recurrent, torch.float32, CPU, checkpoints=2)
    pool.poison()
    return pool


@torch.inference_mode()
def prefill(
    target: TargetModel, states: StatePool, ends: Sequence[int], saves: Sequence[tuple[int, int, int]] = ()
) -> Tensor:
    """The hidden states of TOKENS, in chunks that end at `ends`."""
    pool = make_pool(target.config, 48, CPU)
    attention, table = torch_native(pool), torch.arange(48, dtype=torch.int32)[None]
    outputs, start = list[Tensor](), 0
    for end in ends:
        layout = Layout((end - start,), (end,))
        batch = prefill_batch(torch.tensor([0]), torch.tensor([end]), table, Causal(), layout)
        batch = replace(batch, recurrent=PromptRows(states, [(0, start, end - start)], saves))
        bound, positions = attention.plan(layout).bind(batch), torch.arange(start, end)
        outputs.append(target(TOKENS[start:end], positions, bound).hidden)
        start = end
    return torch.cat(outputs)


def test_it_computes_what_the_layers_compute_one_by_one(target: TargetModel) -> None:
    fused, by_layer = states_of(target), states_of(target)
    at_once = prefill(target, fused, (40,))
    target._native = None
    torch.testing.assert_close(prefill(target, by_layer, (40,)), at_once, atol=1e-4, rtol=0)
    torch.testing.assert_close(fused.states[:, 0], by_layer.states[:, 0], atol=1e-4, rtol=0)


def test_states_within_a_chunk_are_saved_bit_for_bit(target: TargetModel) -> None:
    whole, alone = states_of(target), states_of(target)
    hidden = prefill(target, whole, (40,), [(0, 7, 2), (0, 31, 3)])
    assert torch.equal(prefill(target, alone, (7,)), hidden[:7])
    assert torch.equal(whole.states[:, 2], alone.states[:, 0])
    assert torch.equal(whole.rings[:, 2], alone.rings[:, 0])
    again = states_of(target)
    assert torch.equal(prefill(target, again, (5, 31)), hidden[:31])
    assert torch.equal(whole.states[:, 3], again.states[:, 0])
