"""Linear layers with weights packed for the native kernels of a CPU, for oneDNN, or rounded for a GPU's kernels."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.linear.blocks import BlockWeight
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight, quantize
from eagle_server.ops.linear.rounded import GROUPS, RoundedWeight
from eagle_server.ops.linear.torch_quantized import TorchQuantizedWeight
from eagle_server.ops.native.library import available
from eagle_server.ops.native.linear import NativeWeight, native_linear

Codes = QuantizedWeight | BlockWeight | NativeWeight  # a weight that is rounded already

_FP8_CAPABILITY = (8, 9)  # the first GPUs that convert and multiply fp8: Ada
_ROWS_HINT = 16  # oneDNN chooses its blocking for this row count, that of a verify window
_SMALL = 1 << 19  # elements; for smaller weights F.linear is faster on one float32 row (256x512: 7 us against 13 us)

# (limit, step): row counts up to `limit` are padded to a multiple of `step`. oneDNN generates code for each pair of row
# count and weight shape at its first use: 1 ms and half a megabyte each, the last 1024 are cached. Padding bounds their
# number, because batches may have any row count.
_STEPS = ((32, 1), (256, 8), (512, 32), (sys.maxsize, 128))


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in], packed for one kind of kernels. The plain layout and oneDNN's may both be kept."""

    plain: Tensor | None
    blocked: Tensor | None
    native: NativeWeight | None = None
    rounded: RoundedWeight | TorchQuantizedWeight | None = None

    @property
    def nbytes(self) -> int:
        return sum(
            tensor.nbytes for tensor in (self.plain, self.blocked, self.native, self.rounded) if tensor is not None
        )


def pack_weight(weight: Tensor, quantization: Quantization | None = None, codes: Codes | None = None) -> PackedWeight:
    """Pack a weight [out, in]. Devices and dtypes without a faster layout keep the plain one.

    `codes`: the weight, already rounded; of `weight` only shape, dtype and device are read then.

    Where no kernel computes with a rounded weight, it is multiplied out again.

    Raises:
        ValueError: `quantization` is asked for where no kernels compute with it.
    """
    device, dtype = weight.device, weight.dtype
    if isinstance(codes, BlockWeight):
        weight, codes = _from_blocks(weight, codes)
    if isinstance(codes, NativeWeight):
        return PackedWeight(None, None, codes)
    if quantization is not None and codes is None:
        codes = _quantized(weight, quantization)
    if codes is not None:
        if codes.quantization != "fp8" and available(device, dtype):
            return PackedWeight(None, None, NativeWeight(codes))
        if fits(codes, device, dtype):
            on_cpu = device.type == "cpu"
            rounded = TorchQuantizedWeight(codes, dtype) if on_cpu else RoundedWeight.packed(codes, device, dtype)
            return PackedWeight(None, None, rounded=rounded)
        weight = codes.dense().to(device, dtype)
    if available(weight.device, weight.dtype):
        return PackedWeight(None, None, NativeWeight(weight))
    if not _packable(weight):
        return PackedWeight(weight, None)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    keep = weight.dtype == torch.float32 and weight.numel() < _SMALL
    return PackedWeight(weight if keep else None, blocked)


def _from_blocks(weight: Tensor, blocks: BlockWeight) -> tuple[Tensor, NativeWeight | QuantizedWeight | None]:
    """For native kernels as they are, for others as int4 or, in the place of `weight`, multiplied out."""
    if available(weight.device, weight.dtype):
        return weight, NativeWeight(blocks)
    as_int4 = blocks.as_int4()
    return (weight, as_int4) if as_int4 is not None else (blocks.dense().to(weight.device, weight.dtype), None)


def _quantized(weight: Tensor, quantization: Quantization) -> QuantizedWeight:
    if (reason := why_not_computed(quantization, weight.device, weight.dtype)) is not None:
        raise ValueError(f"--quantization {quantization}: {reason}")
    return quantize(weight, quantization)


def why_not_computed(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernels compute with weights rounded so; None: some do."""
    native = quantization != "fp8" and available(device, dtype)
    return None if native else why_not(quantization, device, dtype)


def why_not(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why there are no kernels for such weights here, native ones aside; None: there are.

    torch's int8 kernel for GPUs has no tensor cores and is slower than bfloat16, so it is not used. Its int4 kernel has
    a layout of its own, which would be kept beside ours, so `rounded_linear` computes int4 for all numbers of rows.
    """
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
    """Whether there is a kernel that computes with this weight on the device, native ones aside."""
    if why_not(weight.quantization, device, dtype) is not None:
        return False
    outputs, inputs = weight.codes.shape
    if inputs % 16 or (outputs % 16 and device.type == "cpu"):
        return False
    if weight.quantization == "int4":
        return inputs % weight.group == 0 and weight.group in GROUPS
    return len(weight.scales) == 1 or weight.group in GROUPS


def unpack_weight(weight: PackedWeight) -> Tensor:
    """The weight [out, in] in the plain layout, restored bit for bit if it was dropped."""
    if weight.plain is not None:
        return weight.plain
    if weight.native is not None:
        return weight.native.dense()
    if weight.rounded is not None:
        return weight.rounded.dense()
    if weight.blocked is None:
        raise ValueError("an empty PackedWeight")
    return weight.blocked.to_dense()


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight^T + bias -> [rows, out], written to `out` if there is one."""
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else out.copy_(F.linear(x, weight, bias))


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight^T + bias -> [rows, out], written to `out` if there is one."""
    if weight.plain is not None and (weight.blocked is None or x.shape[0] == 1):
        return dense_linear(x, weight.plain, bias, out)
    product = _packed_product(x, weight, bias)
    return product if out is None else out.copy_(product)


def _packed_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    if weight.native is not None:
        return native_linear(x, weight.native, bias)
    if weight.rounded is not None:
        product = weight.rounded.linear(x)
        return product if bias is None else product + bias
    rows = x.shape[0]
    padding = computed_rows(rows) - rows
    padded = F.pad(x, (0, 0, 0, padding)) if padding else x
    y: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight.blocked, bias, "none", [], "")
    return y[:rows]


@cache
def computed_rows(rows: int) -> int:
    """`rows` rounded up to a row count that is computed (see `_STEPS`)."""
    step = next(step for limit, step in _STEPS if rows <= limit)
    return -(-rows // step) * step


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
