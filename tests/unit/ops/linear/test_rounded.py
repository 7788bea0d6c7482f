"""Products with weights in fp8 and int4, and rows that are rounded to fp8: torch twins and kernels.

The interpreter multiplies float32 only. On a GPU the same sums are made by tensor cores, see tests/gpu/test_ops.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_server.ops.linear.fp8_rows import FP8, fp8_rows
from eagle_server.ops.linear.packed import fits
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight, quantize
from eagle_server.ops.linear.rounded import RoundedWeight, rounded_linear
from tests.support.covering import covering
from tests.support.kernels import DEVICE, each_variant, generator, take

GPU = torch.device("cuda", 0)
FORMATS: list[tuple[Quantization, int]] = [("fp8", 0), ("fp8", 128), ("int4", 32), ("int4", 128)]  # 0: one group
ROWS = (1, 5, 16, 17, 130)


def exact_weight(quantization: Quantization, outputs: int, inputs: int, group: int) -> QuantizedWeight:
    """Small codes and powers of two as scales: with small whole inputs, sums in any order are exact."""
    source, group = generator(outputs, inputs), group or inputs
    shape = (-(-inputs // group), outputs)
    scales = 2.0 ** torch.randint(-2, 3, shape, generator=source)
    if quantization == "fp8":
        codes = torch.randint(-6, 7, (outputs, inputs), generator=source).to(FP8)
        return QuantizedWeight("fp8", codes, scales, torch.zeros(shape, dtype=torch.uint8), group)
    codes = torch.randint(16, (outputs, inputs), generator=source, dtype=torch.uint8)
    zeros = torch.randint(16, shape, generator=source, dtype=torch.uint8)
    return QuantizedWeight("int4", codes, scales, zeros, group)


@each_variant(rounded_linear)
@pytest.mark.parametrize(
    ("quantization", "group", "outputs", "inputs", "rows"),
    covering(FORMATS, [16, 40, 144], [128, 384, 2304], list(ROWS), together=2),
)
def test_products_of_whole_numbers_are_exact(
    variant: str, quantization: Quantization, group: int, outputs: int, inputs: int, rows: int
) -> None:
    """With 2,304 inputs they are split in two, of 1,280 and 1,024."""
    weight = exact_weight(quantization, outputs, inputs, group)
    packed = RoundedWeight.packed(weight, DEVICE, torch.float32)
    x = torch.randint(-3, 4, (rows, inputs), generator=generator(rows)).float()
    found = rounded_linear(x.to(DEVICE), packed)
    assert found.cpu().equal((x.double() @ weight.dense().double().t()).float())
    assert packed.splits == (2 if inputs > 2048 else 1)


@each_variant(rounded_linear)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_products_are_those_of_the_rounded_weight(variant: str, form: tuple[Quantization, int]) -> None:
    source = generator(len(form[0]))
    weight = quantize(torch.randn(80, 2304, generator=source) / 48, form[0])
    if form == ("fp8", 128):  # in blocks
        scales = torch.rand(18, 80, generator=source) + 0.5
        weight = QuantizedWeight("fp8", weight.codes, scales, torch.zeros(18, 80, dtype=torch.uint8), 128)
    packed = RoundedWeight.packed(weight, DEVICE, torch.float32)
    assert packed.dense().cpu().equal(weight.dense())
    x = torch.randn(20, 2304, generator=source)
    expected = x.double() @ weight.dense().double().t()
    found = rounded_linear(x.to(DEVICE), packed)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_twin_rounds_once_to_the_dtype_of_its_inputs(form: tuple[Quantization, int]) -> None:
    weight = exact_weight(form[0], 32, 256, form[1])
    packed = RoundedWeight.packed(weight, torch.device("cpu"), torch.bfloat16)
    x = torch.randint(-3, 4, (3, 256), generator=generator(1)).bfloat16()
    expected = x.double() @ weight.dense().double().t()
    assert packed.linear(x).equal(expected.bfloat16())
    per_weight = 1 if form[0] == "fp8" else 0.5
    assert packed.nbytes == 32 * (256 * per_weight + len(weight.scales) * (4 if form[0] == "fp8" else 5))


@pytest.mark.parametrize(
    ("outputs", "inputs", "splits"),
    [(6144, 4096, 2), (4096, 4096, 2), (28672, 4096, 1), (4096, 14336, 2), (128256, 4096, 1), (1024, 4096, 4)],
)
def test_inputs_are_split_where_outputs_do_not_fill_a_gpu(outputs: int, inputs: int, splits: int) -> None:
    """An H100 reads these shapes of Llama-3.1-8B fastest so; the last one has the keys and values of a layer."""
    codes = torch.empty((outputs, inputs), dtype=FP8, device="meta")
    packed = RoundedWeight(codes, torch.empty((1, outputs), device="meta"), None, inputs, torch.bfloat16)
    assert packed.splits == splits
    assert packed.split_inputs * splits == inputs


def test_many_rows_are_rounded_to_fp8() -> None:
    """On a CPU, where torch has the product too but slowly. The error is that of three bits behind the point."""
    torch.manual_seed(0)
    weight = torch.randn(48, 320) * torch.rand(48, 1)
    rounded = quantize(weight, "fp8")
    assert (rounded.dense() - weight).norm() / weight.norm() < 0.03
    packed = RoundedWeight.packed(rounded, torch.device("cpu"), torch.bfloat16)
    assert packed.dense().equal(rounded.dense().bfloat16())
    for rows, most in ((1, 0.01), (64, 0.01), (65, 0.05), (200, 0.05)):
        x = (torch.randn(rows, 320) * torch.tensor([1e-3, 1.0, 1e3, 1.0]).repeat(50)[:rows, None]).bfloat16()
        error = packed.linear(x).float() - x.float() @ rounded.dense().t()
        assert (error.norm(dim=1) / (x.float() @ weight.t()).norm(dim=1)).max() < most
    assert packed.linear(torch.zeros(99, 320, dtype=torch.bfloat16)).eq(0).all()


@pytest.mark.parametrize("outputs", [64, 4096])
def test_the_fp8_product_of_gpus_takes_what_it_is_given(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take("torch", monkeypatch)
    with FakeTensorMode():
        codes = torch.empty((outputs, 128), dtype=FP8, device=GPU)
        packed = RoundedWeight(codes, torch.empty((1, outputs), device=GPU), None, 128, torch.bfloat16)
        out = packed.linear(torch.empty(65, 128, dtype=torch.bfloat16, device=GPU))
    assert (out.shape, out.dtype, out.device.type) == ((65, outputs), torch.bfloat16, "cuda")


def test_shapes_and_groups_without_a_kernel_do_not_fit() -> None:
    for weight in (
        exact_weight("fp8", 64, 136, 0),
        exact_weight("fp8", 64, 192, 96),
        exact_weight("int4", 64, 144, 16),
        exact_weight("int4", 64, 96, 64),
    ):
        assert not fits(weight, GPU, torch.bfloat16)
    assert fits(exact_weight("fp8", 33, 144, 128), GPU, torch.bfloat16)  # the last block has 16 inputs


def of_fp8(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Numbers of fp8 with 448 among them, and a power of two for each row."""
    source = generator(rows, size)
    codes = torch.randint(0, 127, (rows, size), generator=source, dtype=torch.uint8)
    codes[:, -1] = 126  # 448
    codes |= torch.randint(2, (rows, size), generator=source, dtype=torch.uint8) << 7
    return codes.view(FP8), 2.0 ** torch.randint(-20, 20, (rows, 1), generator=source)


@each_variant(fp8_rows)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 16), (5, 320), (2, 4097)])
def test_what_fp8_holds_is_kept(variant: str, rows: int, size: int, dtype: torch.dtype) -> None:
    codes, scales = of_fp8(rows, size)
    found = fp8_rows((codes.float() * scales).to(DEVICE, dtype))
    assert (found[0].dtype, found[1].dtype) == (FP8, torch.float32)
    assert found[0].cpu().view(torch.uint8).equal(codes.view(torch.uint8))
    assert found[1].cpu().equal(scales)


@each_variant(fp8_rows)
def test_rows_are_rounded_to_the_nearest(variant: str) -> None:
    """Within half a unit of the last of three bits behind the point. The interpreter has no right conversion to fp8."""
    x = torch.randn(6, 500, generator=generator(6)) * 10.0 ** torch.arange(-3, 3)[:, None]
    codes, scales = (each.cpu() for each in fp8_rows(x.to(DEVICE)))
    assert scales.equal(x.abs().amax(1, keepdim=True) / 448)
    if variant == "torch" or DEVICE.type == "cuda":
        error = (codes.float() - x / scales).abs()
        assert (error <= torch.clamp((x / scales).abs() / 16, min=2.0**-10)).all()
    zeros, least = fp8_rows(torch.zeros(2, 20, device=DEVICE))
    assert zeros.cpu().float().eq(0).all() and bool((least > 0).all())
