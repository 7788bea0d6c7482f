"""Linear layers over rounded weights by torch's kernels, on CPUs without native kernels: int8 and int4."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.linear.quantize import QuantizedWeight

_MIDDLE = 8  # the code that stands for the zero in torch's int4 format


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
