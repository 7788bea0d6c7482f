"""Norms, gate and rotation: torch twins against their definitions, calls of FlashInfer against its signatures."""

from __future__ import annotations

import importlib.util
import inspect
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.attention.interface import LayerSpec
from eagle_server.models.config import ModelConfig, RopeConfig
from eagle_server.models.drafts.eagle import EagleConfig, EagleHead
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.layers import RMSNorm
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.layers import fused
from eagle_server.ops.layers.fused import AngleRows, AngleTable
from tests.support.fused_kernels import fake_flashinfer, use_kernel_branch
from tests.support.kernels import each_variant

CPU = torch.device("cpu")
Model = TypeVar("Model", bound=torch.nn.Module)


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@each_variant(fused.add_rms_norm, fused.rms_norm, fused.owned)
@pytest.mark.parametrize("size", [1, 24, 129])
def test_the_norm_after_an_addition_is_the_norm_of_the_sum(variant, size):
    x, residual, weight = normal(5, size), normal(5, size, seed=1), normal(size, seed=2)
    kept = x.clone(), residual.clone()
    normed, stream = fused.add_rms_norm(fused.owned(x), fused.owned(residual), weight, 1e-6)
    assert torch.equal(stream, kept[0] + kept[1])
    assert torch.equal(normed, fused.rms_norm(stream, weight, 1e-6))
    exact = stream.double() / (stream.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(normed.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1]), "what is owned is a copy, if it is overwritten"


@each_variant(fused.add_rms_norm, fused.rms_norm)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_an_offset_multiplies_by_the_sum_before_it_rounds(variant, dtype):
    x, residual, weight = (normal(*size, seed=i, dtype=dtype) for i, size in enumerate([(5, 24), (5, 24), (24,)]))
    wide = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.float())
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-6, 1.0), wide.to(dtype))
    normed, stream = fused.add_rms_norm(x, residual, weight, 1e-6, 1.0)
    assert torch.equal(normed, fused.rms_norm(stream, weight, 1e-6, 1.0))


@each_variant(fused.gelu_tanh_mul)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_gemma_is_gelu_of_the_first_half_times_the_second(variant, dtype):
    gate_up = normal(3, 14, dtype=dtype)
    assert torch.equal(fused.gelu_tanh_mul(gate_up), F.gelu(gate_up[:, :7], approximate="tanh") * gate_up[:, 7:])


@each_variant(fused.silu_mul)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_silu_of_the_first_half_times_the_second(variant, dtype):
    gate_up = normal(3, 14, dtype=dtype)
    assert torch.equal(fused.silu_mul(gate_up), F.silu(gate_up[:, :7]) * gate_up[:, 7:])


def test_gradients_flow_through_every_twin():
    x, residual, weight = (normal(2, 8, dtype=torch.float64, seed=s).requires_grad_() for s in range(2, 5))
    rows = angles(torch.arange(2), 4, torch.float64)

    def everything(*given: Tensor) -> Tensor:
        normed, stream = fused.add_rms_norm(given[0], given[1], given[2][0], 1e-6)
        turned = fused.apply_rope(normed.view(2, 2, 4), rows)
        return fused.silu_mul(fused.apply_rope(turned, rows, interleaved=True).flatten(1)) + stream[:, :4]

    assert torch.autograd.gradcheck(everything, (x, residual, weight))


def angles(positions: Tensor, dim: int, dtype: torch.dtype = torch.float32, part: float = 1.0) -> AngleRows:
    config = RopeConfig(theta=100.0, partial_rotary_factor=part)
    rotation = RotaryEmbedding(config, dim, 64)(positions, dtype)
    assert isinstance(rotation, AngleRows)
    return rotation


def turned(x: Tensor, positions: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """Each pair of coordinates is a complex number that is multiplied by exp(i * position * theta^(-2j / dim))."""
    out = torch.empty_like(x, dtype=torch.float64)
    for j, (real, imaginary) in enumerate(pairs):
        angle = positions.double() * 100.0 ** (-2 * j / x.shape[-1])
        number = torch.complex(x[..., real].double(), x[..., imaginary].double())
        number = number * torch.polar(torch.ones_like(angle), angle)[:, None]
        out[..., real], out[..., imaginary] = number.real, number.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_rotation_multiplies_pairs_as_complex_numbers(dim, interleaved):
    x, positions = normal(5, 3, dim), torch.tensor([0, 1, 7, 7, 63])
    half = dim // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    expected = turned(x, positions, pairs)
    rows = angles(positions, dim)
    before = x.clone()
    found = fused.apply_rope(x, rows, interleaved=interleaved)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    q, k = fused.apply_rope_pair(x[:, :2], x[:, 2:], rows, interleaved=interleaved)
    assert torch.equal(torch.cat([q, k], dim=1), found)
    assert torch.equal(x, before), "the twin overwrites nothing"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(4, 2), (10, 6), (64, 16), (6, 4)])
def test_rotation_of_a_part_of_a_head_leaves_the_other_dimensions(dim, rotary, interleaved):
    x, positions = normal(5, 3, dim), torch.tensor([0, 1, 7, 7, 63])
    rows = angles(positions, dim, part=rotary / dim)
    assert rows.cos.shape[-1] == rotary
    found = fused.apply_rope(x, rows, interleaved=interleaved)
    first = fused.apply_rope(x[..., :rotary], angles(positions, rotary), interleaved=interleaved)
    assert torch.equal(found, torch.cat([first, x[..., rotary:]], dim=-1))


def test_dense_attention_takes_values_of_another_size_than_keys():
    q, k, v = normal(6, 4, 8), normal(6, 2, 8, seed=1), normal(6, 2, 5, seed=2)
    out = DenseCausal(2).run(q, k, v, LayerSpec(0, 0.5))
    wide = DenseCausal(2).run(q, k, F.pad(v, (0, 3)), LayerSpec(0, 0.5))
    torch.testing.assert_close(out, wide[..., :5])


def test_both_conventions_are_the_same_rotation_of_reordered_coordinates():
    x, rows = normal(4, 2, 16), angles(torch.arange(4), 16)
    pairs_apart = x.unflatten(-1, (8, 2)).transpose(-1, -2).flatten(-2)
    found = fused.rotate(pairs_apart, *rows).unflatten(-1, (2, 8)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(fused.rotate_interleaved(x, *rows), found)


def test_the_kernels_table_holds_a_positions_cosines_then_its_sines(monkeypatch):
    rope = RotaryEmbedding(RopeConfig(theta=100.0), 64, 32)
    positions = torch.tensor([3, 31, 0])
    rows = rope(positions, torch.float32)
    monkeypatch.setattr("eagle_server.models.rope.can_use_table", lambda *_: True)
    rotation = rope(positions, torch.bfloat16)
    assert isinstance(rotation, AngleTable) and rotation.table.dtype == torch.float32
    assert rotation.table is rope(positions, torch.bfloat16).table, "made once"
    cos, sin = rotation.table[positions].chunk(2, dim=1)
    x = normal(3, 2, 64)
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(fused.apply_rope(x, rows), expected)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel branch of every function on a CPU, with torch in place of FlashInfer."""
    use_kernel_branch(monkeypatch)


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_branch_equals_the_twins(in_place, interleaved, part):
    x, residual, norm, gate_up = normal(3, 64), normal(3, 64, seed=1), RMSNorm(64, 1e-5), normal(3, 32, seed=3)
    rope = RotaryEmbedding(RopeConfig(partial_rotary_factor=part), 16, 8)
    positions = torch.tensor([1, 5, 2])

    def results() -> list[Tensor]:
        q_k = x.view(3, 4, 16).clone()
        return [
            norm(x),
            *norm.after_add(x.clone(), residual.clone()),
            fused.silu_mul(gate_up),
            fused.apply_rope(q_k, rope(positions, x.dtype), interleaved=interleaved),
        ]

    with torch.no_grad():
        kernels = results()
    for kernel, twin in zip(kernels, results(), strict=True):
        torch.testing.assert_close(kernel, twin)


SHAPE = ModelConfig(
    "LlamaForCausalLM", 50, 32, 48, 3, 4, 2, 8, 1e-5, RopeConfig(), 64, (64, ""), torch.float32, qk_norm=True
)


@pytest.fixture
def target() -> TargetModel:
    return randomized(TargetModel(SHAPE, 64)).requires_grad_(requires_grad=False)


def randomized(model: Model) -> Model:
    for index, parameter in enumerate(model.parameters()):
        parameter.data = normal(*parameter.shape, seed=index) * 0.3
    return model


def run(model: torch.nn.Module, *given: Tensor, **more: object) -> list[Tensor]:
    """A forward over five sequences of one token, first with the twins, then with the kernels. Results must agree."""
    positions = torch.tensor([0, 3, 9, 1, 63])
    twins = vars(model(*given, positions, DenseCausal(5), **more))
    kept = [x.clone() for x in given]
    with torch.no_grad():
        kernels = vars(model(*given, positions, DenseCausal(5), **more))
    assert all(torch.equal(x, before) for x, before in zip(given, kept, strict=True)), "the caller's tensors changed"
    for name, value in twins.items():
        torch.testing.assert_close(kernels[name], value.detach(), rtol=1e-4, atol=1e-4)
    return [value.detach() for value in twins.values()]


def test_a_target_may_be_overwritten_inside_but_not_its_captured_streams(in_place, target):
    """Every boundary is captured, including the embedding and the last layer."""
    hidden, aux = run(target, torch.tensor([1, 2, 3, 4, 49]), aux_boundaries=range(4))
    assert aux.shape == (5, 4 * 32)
    torch.testing.assert_close(target.norm(aux[:, 96:]).detach(), hidden)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_an_eagle3_head_leaves_its_callers_feature_alone(in_place, target, before, norm_output):
    config = Eagle3Config(SHAPE, 32, 50, (1, 2), norm_before_residual=before, norm_output=norm_output)
    head = randomized(Eagle3Head(config, 64, TargetWeights(target.embed, target.lm_head)))
    run(head, torch.tensor([1, 2, 3, 4, 49]), normal(5, 32))


def test_an_eagle_head_leaves_its_callers_feature_alone(in_place, target):
    head = randomized(EagleHead(EagleConfig(SHAPE), 64, TargetWeights(target.embed, target.lm_head)))
    run(head, torch.tensor([1, 2, 3, 4, 49]), normal(5, 32))


@pytest.mark.deep
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.filterwarnings("ignore")  # of its dependencies
def test_flashinfer_has_the_functions_that_are_called():
    flashinfer = fused._flashinfer()
    for name, ours in vars(fake_flashinfer()).items():
        theirs = inspect.signature(getattr(flashinfer, name)).parameters
        for parameter in inspect.signature(ours).parameters.values():
            assert list(theirs).index(parameter.name) == list(inspect.signature(ours).parameters).index(parameter.name)
        needed = [p.name for p in theirs.values() if p.default is p.empty]
        assert set(needed) <= set(inspect.signature(ours).parameters)


def test_kernels_are_for_16_bit_cuda_tensors_outside_autograd(monkeypatch):
    monkeypatch.setattr(fused, "_uses_flashinfer", True)
    cuda = torch.device("cuda")
    assert not fused.can_use_table(cuda, torch.bfloat16, 64, 64), "autograd is on"
    with torch.no_grad():
        assert fused.can_use_table(cuda, torch.bfloat16, 64, 64)
        assert fused.can_use_table(cuda, torch.float16, 128, 64)
        assert not fused.can_use_table(cuda, torch.bfloat16, 80, 80), "a head size without a kernel"
        assert not fused.can_use_table(cuda, torch.bfloat16, 64, 16), "a thread would rotate across the halves"
        assert not fused.can_use_table(cuda, torch.float32, 64, 64)
        assert not fused.can_use_table(CPU, torch.bfloat16, 64, 64)
        monkeypatch.setattr(fused, "_uses_flashinfer", False)
        assert not fused.can_use_table(cuda, torch.bfloat16, 64, 64)
