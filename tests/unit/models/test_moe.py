"""Experts: the grouped product against its twin, the router against its rules, and no device synchronization."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError, MoEConfig
from eagle_server.models.layers import Linear
from eagle_server.models.moe import MixtureOfExperts, Router
from eagle_server.models.targets.registry import read_target_config
from eagle_server.ops.linear.grouped import group_ends, grouped_linear, grouped_linear_twin
from eagle_server.ops.native.library import available
from tests.support.deepseek import DEEPSEEK, write_config
from tests.support.paged import CPU
from tests.unit.worker.test_no_host_sync import Device

MOE = MoEConfig(
    experts=12,
    experts_per_token=3,
    intermediate_size=16,
    shared_experts=1,
    dense_layers=frozenset(),
    scoring="sigmoid",
    routing="noaux_tc",
    groups=4,
    topk_groups=2,
    normalize=True,
    scale=1.5,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "groups", "out", "inside"), [(1, 1, 8, 8), (40, 6, 24, 16), (7, 64, 32, 40), (9, 3, 5, 7)]
)
def test_grouped_product_equals_its_twin_and_every_row_alone(
    dtype: torch.dtype, rows: int, groups: int, out: int, inside: int
) -> None:
    """Empty groups, one group, more groups than rows, and sizes that only the twin supports."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(groups, (rows,), generator=generator).sort().values
    ids = ids[ids != groups // 2] if groups > 2 else ids
    x = torch.randn(len(ids), inside, generator=generator).to(dtype)
    weight = torch.randn(groups, out, inside, generator=generator).to(dtype)
    ends = group_ends(ids, groups)
    assert ends.tolist() == [int((ids <= group).sum()) for group in range(groups)]
    expected = torch.stack([weight[group].double() @ row.double() for group, row in zip(ids, x, strict=True)])
    for found in (grouped_linear(x, weight, ends), grouped_linear_twin(x, weight, ends)):
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7 * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


def router(config: MoEConfig, hidden: int = 8) -> Router:
    torch.manual_seed(0)
    made = Router(config, hidden)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.5)
    return made


def reference(made: Router, row: torch.Tensor) -> dict[int, float]:
    """The experts and weights of one row, in plain Python."""
    config = made.config
    logits = (made.weight.double() @ row.double()).detach()
    scores = (logits.softmax(0) if config.scoring == "softmax" else logits.sigmoid()).tolist()
    bias = [0.0] * config.experts if made.correction_bias is None else made.correction_bias.tolist()
    worth = [score + b for score, b in zip(scores, bias, strict=True)]
    size = config.experts // config.groups
    groups = [range(start, start + size) for start in range(0, config.experts, size)]
    best = 1 if made.correction_bias is None else 2
    quality = [sum(sorted((worth[e] for e in group), reverse=True)[:best]) for group in groups]
    kept = sorted(range(config.groups), key=lambda g: -quality[g])[: config.topk_groups]
    open_to = [expert for group in kept for expert in groups[group]]
    chosen = sorted(open_to, key=lambda e: -worth[e])[: config.experts_per_token]
    total = sum(scores[e] for e in chosen) if config.normalize else 1.0
    return {e: config.scale * scores[e] / total for e in chosen}


ROUTERS = {
    "v3": MOE,
    "v3, one group": replace(MOE, groups=1, topk_groups=1),
    "v3, unnormalized": replace(MOE, normalize=False),
    "v2": replace(MOE, scoring="softmax", routing="greedy", groups=1, topk_groups=1, normalize=False),
    "v2, normalized": replace(MOE, scoring="softmax", routing="greedy", groups=1, topk_groups=1),
    "v2, groups": replace(MOE, scoring="softmax", routing="group_limited_greedy", normalize=False),
    "groups of one expert": replace(MOE, groups=12, topk_groups=5),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router_follows_its_rules(name: str) -> None:
    made = router(ROUTERS[name])
    x = torch.randn(30, 8)
    for row, chosen, weights in zip(x, *made(x), strict=True):
        found = dict(zip(chosen.tolist(), weights.tolist(), strict=True))
        assert found == pytest.approx(reference(made, row), abs=1e-6)


def test_router_computes_in_float32_for_every_dtype_of_the_model() -> None:
    made, x = router(MOE), torch.randn(30, 8).bfloat16()
    chosen, weights = made(x)
    exact, _ = made(x.float())
    assert torch.equal(chosen, exact)
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nothing_synchronizes_with_the_device(dtype: torch.dtype) -> None:
    config = read_target_config(DEEPSEEK)
    model = MixtureOfExperts(config, MOE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.shared, model.experts = model.shared.to(dtype), model.experts.to(dtype)
    device = Device()
    device.inside = True
    with device, torch.inference_mode():
        assert model(torch.randn(5, config.hidden_size, dtype=dtype)).dtype == dtype
    assert not device.refused


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "topk_method": ({"topk_method": "expert_choice"}, "topk_method 'expert_choice' is not supported; supported are"),
    "scoring_func": ({"scoring_func": "softplus"}, "scoring_func 'softplus' is not supported; supported are"),
    "groups": ({"n_group": 3}, "n_routed_experts 8, n_group 3, .* do not fit"),
    "experts": ({"topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok 3 do not fit"),
    "rank": ({"kv_lora_rank": None}, "kv_lora_rank must be a positive integer, found None"),
    "quantized": ({"quantization_config": {"quant_method": "hqq"}}, "hqq is not supported; known are gptq, awq"),
    "v3.2": ({"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}, "'DeepseekV32ForCausalLM'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_config_is_refused(tmp_path: Any, name: str) -> None:

    settings, message = REFUSED[name]
    (tmp_path / "config.json").write_text("{}")
    write_config(tmp_path, **{**DEEPSEEK, **settings})
    with pytest.raises(CheckpointError, match=message):
        load_target(tmp_path, Loading(progress=False))


def test_a_model_without_experts_is_dense_throughout() -> None:
    config = read_target_config({**DEEPSEEK, "n_routed_experts": None})
    assert config.moe is None


def test_layers_are_sparse_from_the_first_on_and_by_frequency() -> None:
    config = read_target_config(
        {**DEEPSEEK, "num_hidden_layers": 6, "first_k_dense_replace": 2, "moe_layer_freq": 2}
    ).moe
    assert config is not None
    assert [config.is_sparse(layer) for layer in range(6)] == [False, False, True, False, True, False]


def test_qwen3_has_experts_by_step_and_names_its_dense_layers() -> None:
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    moe = read_target_config(raw).moe
    assert moe is not None and moe.experts == 4 and not moe.normalize
    assert [moe.is_sparse(layer) for layer in range(6)] == [False, True, False, False, False, True]
    with pytest.raises(CheckpointError, match="num_experts_per_tok 5 of num_experts 4"):
        read_target_config({**raw, "num_experts_per_tok": 5})


def test_glm_rotates_half_of_a_head_unless_config_says_otherwise() -> None:
    raw = {
        "architectures": ["Glm4MoeForCausalLM"],
        **{key: DEEPSEEK[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")},
        **{"intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        **{"num_hidden_layers": 3, "head_dim": 24},
    }
    config = read_target_config(raw)
    assert config.rope.rotary_dim(config.head_dim) == 12
    assert config.moe is not None and [config.moe.is_sparse(layer) for layer in range(3)] == [False, True, True]
    quarter = read_target_config({**raw, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}})
    assert quarter.rope.rotary_dim(24) == 6
    with pytest.raises(CheckpointError, match="rotates 7 of 24 dimensions; an even number"):
        read_target_config({**raw, "partial_rotary_factor": 0.3})


@torch.inference_mode()
@pytest.mark.skipif(not available(CPU, torch.float32), reason="native kernels sum each row by itself")
def test_a_row_of_gated_shared_experts_has_the_same_bits_in_every_batch() -> None:
    config = replace(read_target_config(DEEPSEEK), hidden_size=256, moe=replace(MOE, shared_gate=True))
    assert config.moe is not None
    torch.manual_seed(0)
    mixture, x = MixtureOfExperts(config, config.moe), torch.randn(90, 256)
    for parameter in mixture.parameters():
        parameter.normal_(0.0, 0.2)
    for module in mixture.modules():
        if isinstance(module, Linear):
            module.pack()
    whole = mixture(x)
    for rows in (1, 3, 17):
        assert torch.equal(mixture(x[:rows]), whole[:rows]), rows
