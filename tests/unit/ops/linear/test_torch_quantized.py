"""torch's kernels over rounded weights on a CPU, and which formats are computed where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.linear.packed import fits, pack_weight, packed_linear, unpack_weight, why_not
from eagle_server.ops.linear.quantize import Quantization, quantize
from eagle_server.ops.linear.torch_quantized import TorchQuantizedWeight
from eagle_server.ops.native import library as native
from tests.unit.models.test_load_target import checkpoint, logits

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def _without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_enabled", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (256, 48), (320, 80)])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_products_are_those_of_the_rounded_weight(
    quantization: Quantization, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rounded = quantize(torch.randn(outputs, inputs) / inputs**0.5, quantization)
    assert fits(rounded, CPU, dtype)
    weight = TorchQuantizedWeight(rounded, dtype)
    most = 1e-5 if dtype == torch.float32 else 0.02
    for rows in (1, 3, 17, 70):
        x = torch.randn(rows, inputs, dtype=dtype)
        torch.testing.assert_close(weight.linear(x).float(), x.float() @ rounded.dense().t(), atol=most, rtol=most)
    torch.testing.assert_close(weight.dense().float(), rounded.dense(), atol=most, rtol=most)


@pytest.mark.usefixtures("_without_native_kernels")
def test_what_no_kernel_takes_is_multiplied_out() -> None:
    rounded = quantize(torch.randn(33, 64), "int4")
    assert not fits(rounded, CPU, torch.float32)
    packed = pack_weight(torch.empty(33, 64), codes=rounded)
    assert unpack_weight(packed).equal(rounded.dense())
    assert packed_linear(torch.eye(64), packed, None).t().allclose(rounded.dense())


def test_formats_without_a_fast_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not("int4", GPU, torch.bfloat16) is None
    assert why_not("fp8", GPU, torch.bfloat16) is None
    assert "needs --dtype bfloat16" in str(why_not("int4", GPU, torch.float32))
    assert "needs --dtype bfloat16" in str(why_not("fp8", GPU, torch.float32))
    assert "slower than bfloat16" in str(why_not("int8", GPU, torch.bfloat16))
    assert "only GPUs compute with fp8" in str(why_not("fp8", CPU, torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    assert "NVIDIA A100 does not multiply fp8" in str(why_not("fp8", GPU, torch.bfloat16))


def test_fp8_is_refused_on_a_cpu_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--quantization fp8: only GPUs compute with fp8; use int8"):
        load_target(checkpoint(tmp_path), Loading(progress=False, quantization="fp8"))


@pytest.mark.usefixtures("_without_native_kernels")
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.02), ("int4", 0.2)])
def test_a_model_is_rounded_without_native_kernels(
    quantization: Quantization, most: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = checkpoint(tmp_path_factory.mktemp("target"), hidden_size=64, intermediate_size=64, vocab_size=48)
    plain, rounded = (
        load_target(directory, Loading(progress=False)),
        load_target(directory, Loading(progress=False, quantization=quantization)),
    )
    assert isinstance(plain, TargetModel)
    assert isinstance(rounded, TargetModel)
    error = (logits(rounded) - logits(plain)).norm() / logits(plain).norm()
    assert 0 < error < most
    with pytest.raises(CheckpointError, match="--quantization-cache is for native kernels"):
        load_target(directory, Loading(progress=False, quantization=quantization), quantization_cache=directory)
