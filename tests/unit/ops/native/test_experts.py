"""A mixture of experts by the native kernels against `models.moe`: odd sizes, all formats, and rows on their own."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from eagle_server.models.config import ClampedSwiGLU, ModelConfig, MoEConfig, RopeConfig
from eagle_server.models.layers import pack_linears
from eagle_server.models.moe import MixtureOfExperts
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native import library as native
from eagle_server.ops.native.experts import NativeExperts
from tests.support.covering import covering

PLAIN = {"scoring": "softmax", "routing": "greedy", "groups": 1, "topk_groups": 1, "normalize": True, "scale": 1.0}
DEEPSEEK = {"scoring": "sigmoid", "routing": "noaux_tc", "groups": 4, "topk_groups": 2, "normalize": True, "scale": 2.5}
GROUPED = {"scoring": "softmax", "routing": "group_limited_greedy", "groups": 2, "topk_groups": 1, "normalize": False}
LONGCAT = {"scoring": "softmax", "routing": "noaux_tc", "groups": 1, "topk_groups": 1, "normalize": False, "scale": 1.7}
# experts, chosen, inner, hidden, shared, routing
CASES = {
    "Qwen3": (16, 4, 48, 64, 0, PLAIN),
    "DeepSeek-V3": (16, 3, 32, 80, 1, DEEPSEEK),
    "DeepSeek-V2, odd sizes": (6, 2, 37, 53, 2, {**GROUPED, "scale": 1.3}),
    "sizes below a vector": (3, 1, 5, 7, 0, PLAIN),
    "one expert": (1, 1, 24, 16, 0, PLAIN),
    "all experts": (5, 5, 64, 130, 0, {**PLAIN, "normalize": False}),
    "gpt-oss": (6, 2, 24, 40, 0, {**PLAIN, "bias": True, "swiglu": ClampedSwiGLU(0.8, 1.702)}),
    "Step": (6, 2, 24, 40, 2, {**PLAIN, "swiglu": ClampedSwiGLU(0.1, None)}),
    "LongCat, some give back their input": (6, 4, 40, 56, 0, {**LONGCAT, "identities": 3}),
    "wide": (8, 2, 160, 1040, 0, PLAIN),
}
CLOSE = {"float32": 1e-5, "halved": 1e-5, "bfloat16": 0.02, "int8": 0.03, "int4": 0.03}  # of the largest output
ROWS = (1, 2, 7, 40, 150)

pytestmark = pytest.mark.usefixtures("kernels", "threads")


def experts(name: str, kind: str) -> MixtureOfExperts:
    """Random experts, not packed. All kinds but float32 have weights that bfloat16 holds."""
    count, chosen, inner, hidden, shared, routing = CASES[name]
    moe = MoEConfig(count, chosen, inner, shared, frozenset(), **routing)  # type: ignore[arg-type]
    config = ModelConfig(
        *("", 8, hidden, inner, 1, 1, 1, 8),
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position=8,
        context_limit=(8, ""),
        dtype=torch.float32,
        moe=moe,
    )
    module, generator = MixtureOfExperts(config, moe), torch.Generator().manual_seed(count)
    with torch.no_grad():
        for parameter in module.parameters():
            std = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            if kind != "float32":
                parameter.copy_(parameter.bfloat16())
    return module.requires_grad_(requires_grad=False).eval()


def packed(module: MixtureOfExperts, kind: str) -> MixtureOfExperts:
    """A copy for the native kernels, and in `module` the weights that it computes with."""
    mine = deepcopy(module)
    if kind == "bfloat16":
        mine.to(torch.bfloat16)
    rounding: Quantization | None = kind if kind in ("int8", "int4") else None  # type: ignore[assignment]
    pack_linears(mine, rounding)
    views = dict(mine.weight_views(""))
    for name, view in module.weight_views(""):
        view.copy_(views[name])
    return mine


@pytest.mark.parametrize(("name", "kind"), covering(CASES, CLOSE, together=1))
def test_experts_are_torchs_and_rows_do_not_depend_on_each_other(name: str, kind: str) -> None:
    module = experts(name, kind)
    mine = packed(module, kind)
    assert mine.native_weights() is not None
    for rows in ROWS:
        x = torch.randn(rows, CASES[name][3], generator=torch.Generator().manual_seed(rows))
        expected, found = module(x), mine(x)
        worst = (found - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
        assert worst.quantile(0.9) < CLOSE[kind], "a choice between two close experts may differ"
        if kind in ("float32", "halved"):
            assert worst.max() < CLOSE[kind]
        alone = torch.cat([mine(row[None]) for row in x[:20]] + [found[20:]])
        assert torch.equal(found, alone)
        assert torch.equal(mine(x.flip(0)).flip(0), found)


def test_only_the_weights_of_chosen_experts_are_read() -> None:
    """The others are NaN."""
    module = experts("Qwen3", "float32")
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    chosen = set(module.router(x)[0].flatten().tolist())
    expected = module(x)
    for expert in set(range(16)) - chosen:
        for linear in (module.experts.gate_up, module.experts.down):
            linear.weight.data.unflatten(0, (16, -1))[expert] = float("nan")
    assert 0 < len(chosen) < 9
    torch.testing.assert_close(packed(module, "float32")(x), expected, atol=1e-5, rtol=1e-4)


def test_many_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experts("sizes below a vector", "float32")
    mine, x = packed(module, "float32"), torch.randn(2500, 7, generator=torch.Generator().manual_seed(2))
    found = mine(x)
    torch.testing.assert_close(found, module(x), atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(native, "_threads", 3)
    assert torch.equal(mine(x), found)


def test_rows_that_are_no_numbers_leave_the_others(name: str = "DeepSeek-V3") -> None:
    mine = packed(experts(name, "float32"), "float32")
    x: Tensor = torch.randn(3, 80, generator=torch.Generator().manual_seed(3))
    expected = mine(x)
    x[1] = float("nan")
    found = mine(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_given_experts_are_computed_for_each_row_alone_and_must_exist() -> None:
    module = experts("DeepSeek-V2, odd sizes", "float32")
    x = torch.randn(9, 53, generator=torch.Generator().manual_seed(1))
    chosen = torch.stack([torch.arange(9) % 6, (torch.arange(9) + 4) % 6], dim=1)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))
    expected = module.experts(x, chosen, weights)
    pack_linears(module)
    gate_up, down = module.experts.gate_up.native, module.experts.down.native
    assert gate_up is not None and down is not None
    given = NativeExperts(None, gate_up, down)
    y = given.compute_given(x, chosen, weights)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    alone = [given.compute_given(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(9)]
    assert torch.equal(torch.cat(alone), y)
    with pytest.raises(IndexError, match="an expert that does not exist"):
        given.compute_given(x, chosen + 1, weights)
