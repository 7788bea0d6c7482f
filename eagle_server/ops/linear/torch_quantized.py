"""Linear layers over rounded weights by torch's kernels, on CPUs without native kernels: int8 and int4.

Which weights are computed on which device is decided here, too. torch's int8 kernel for GPUs has no tensor cores and is
slower than bfloat16, so it is not used. Its int4 kernel has a layout of its own, which would be kept beside ours, so
`rounded_linear` computes int4 for all numbers of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight
from eagle_server.ops.linear.rounded import GROUPS

_MIDDLE = 8  # the code that stands for the zero in torch's int4 format
_FP8_CAPABILITY = (8, 9)  # the first GPUs that convert and multiply fp8: Ada


def why_not(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why there are no kernels for such weights here; None: there are."""
    if quantization == "mxfp4" or device.type not in ("cpu", "cuda"):
        return f"there are no kernels for it on {device.type}"
    if quantization == "int8" and device.type == "cuda":
        return "torch's int8 kernel for GPUs is slower than bfloat16; use fp8 or int4, or drop it"
    if quantization == "fp8" and device.type == "cpu":
        return "only GPUs compute with fp8; use int8, or drop it"
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"the {quantization} kernel for GPUs needs --dtype bfloat16"
    if quantization == "fp8" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} does not multiply fp8; use int4, or drop it"
    return None


def fits(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel that computes with this weight on the device."""
    if why_not(weight.quantization, device, dtype) is not None:
        return False
    outputs, inputs = weight.codes.shape
    if inputs % 16 or (outputs % 16 and device.type == "cpu"):
        return False
    if weight.quantization == "int4":
        return inputs % weight.group == 0 and weight.group in GROUPS
    return len(weight.scales) == 1 or weight.group in GROUPS


class TorchQuantizedWeight:
    """A weight [out, in] as torch's kernels for CPUs take it. The weight must be one that `fits`."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._group, self._dtype, codes = weight.group, dtype, weight.codes.to("cpu")
        self._is_int4 = weight.quantization == "int4"
        if self._is_int4:
            zeros, scales = weight.zeros.to("cpu").float(), weight.scales.to("cpu")
            self._scales = torch.stack([scales, (_MIDDLE - zeros) * scales], dim=2).to(dtype)
            self._data = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        else:
            self._data = (codes.int() - weight.zeros[0].to("cpu").int()[:, None]).to(torch.int8)
            self._scales = weight.scales[0].to("cpu", dtype)
        self._inputs = codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._scales.nbytes

    def dense(self) -> Tensor:
        """The weight [out, in] that is computed with, in the dtype of the model."""
        return self.linear(torch.eye(self._inputs, dtype=self._dtype)).t().contiguous()

    def linear(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out], without a bias."""
        rounded = x.to(self._dtype).contiguous()
        if self._is_int4:
            return torch._weight_int4pack_mm_for_cpu(rounded, self._data, self._group, self._scales)
        return torch._weight_int8pack_mm(rounded, self._data, self._scales)
