"""Linear layers over rounded weights by torch's kernels: int4 and fp8 on GPUs, integers on CPUs without native kernels.

Only fp8 rounds its inputs, with a scale for each row. torch's int8 kernel for GPUs has no tensor cores and is slower
than bfloat16, so it is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.quantize import Quantization, QuantizedWeight, fp8_rows

_GROUPS = (32, 64, 128, 256)  # inputs that share a scale, in torch's int4 kernels
_MIDDLE = 8  # the code that stands for the zero in torch's int4 format
_INNER_TILES = (8, 4, 2)  # of 16 inputs, packed together on a GPU: the first that divides the inputs
_FP8_CAPABILITY = (8, 9)  # the first GPUs that multiply fp8: Ada


def why_not(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why torch does not compute with such weights here; None: it does."""
    if quantization == "mxfp4" or device.type not in ("cpu", "cuda"):
        return f"torch has no kernels for it on {device.type}"
    if quantization == "int8" and device.type == "cuda":
        return "torch's int8 kernel for GPUs is slower than bfloat16; use fp8 or int4, or drop it"
    if quantization == "fp8" and device.type == "cpu":
        return "only GPUs compute with fp8; use int8, or drop it"
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"torch's {quantization} kernel for GPUs needs --dtype bfloat16"
    if quantization == "fp8" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} does not multiply fp8; use int4, or drop it"
    return None


def fits(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernels compute with this weight on the device."""
    if why_not(weight.quantization, device, dtype) is not None:
        return False
    outputs, inputs = weight.codes.shape
    multiple = 16 if device.type == "cpu" or weight.quantization == "fp8" else 8  # outputs
    if weight.quantization != "int4":
        return outputs % multiple == 0 and inputs % 16 == 0
    return outputs % multiple == 0 and inputs % weight.group == 0 and weight.group in _GROUPS


class TorchQuantizedWeight:
    """A weight [out, in] as torch's kernels take it. The weight must be one that `fits`."""

    def __init__(self, weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> None:
        self._group, self._format, self._dtype = weight.group, weight.quantization, dtype
        self._on_cpu, codes = device.type == "cpu", weight.codes.to(device)
        if self._format == "fp8":
            self._data, self._scales = codes, weight.scales.to(device)
        elif self._format == "int8":
            self._data = (codes.int() - weight.zeros[0].to(device).int()[:, None]).to(torch.int8)
            self._scales = weight.scales[0].to(device, dtype)
        else:
            zeros, scales = weight.zeros.to(device).float(), weight.scales.to(device)
            self._scales = torch.stack([scales, (_MIDDLE - zeros) * scales], dim=2).to(dtype)
            self._data = _packed_int4(codes)
        self._shape = (weight.codes.shape[0], weight.codes.shape[1])

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._scales.nbytes

    def dense(self) -> Tensor:
        """The weight [out, in] that is computed with, in the dtype of the model."""
        if self._format == "fp8":
            return (self._data.float() * self._scales.t()).to(self._dtype)
        identity = torch.eye(self._shape[1], dtype=self._dtype, device=self._data.device)
        return self.linear(identity).t().contiguous()

    def linear(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out], without a bias."""
        if self._format == "fp8":
            codes, scales = fp8_rows(x)
            weight = self._data.t()
            return torch._scaled_mm(codes, weight, scale_a=scales, scale_b=self._scales, out_dtype=self._dtype)
        rounded = x.to(self._dtype).contiguous()
        if self._format == "int8":
            return torch._weight_int8pack_mm(rounded, self._data, self._scales)
        multiply = torch._weight_int4pack_mm_for_cpu if self._on_cpu else torch._weight_int4pack_mm
        return multiply(rounded, self._data, self._group, self._scales)


def _packed_int4(codes: Tensor) -> Tensor:
    """codes uint8 [out, in], below 16."""
    if codes.device.type == "cpu":
        return torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    tiles = next(count for count in _INNER_TILES if codes.shape[1] % (16 * count) == 0)
    even, odd = codes.unflatten(1, (-1, 2)).unbind(2)
    return torch._convert_weight_to_int4pack((even << 4 | odd).contiguous(), tiles)
