"""Linear layers with weights laid out once for oneDNN, which is worth 1.6-2x over F.linear on a CPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 16  # the row count that oneDNN chooses a blocking for: a verify window's
_SMALL = 1 << 19  # elements; below this one float32 row is faster through F.linear (256x512: 7 us against 13)

# (up to, in steps of) row counts that are computed. oneDNN generates code for each count at its first use, in 1 ms, and
# keeps it, in half a megabyte, for the last 1024 of them and their weights' shapes. A batch's may be any.
_STEPS = ((32, 1), (256, 8), (512, 32), (sys.maxsize, 128))


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in] in the plain layout, in oneDNN's, or, where each has its use, in both."""

    plain: Tensor | None
    blocked: Tensor | None


def pack_weight(weight: Tensor) -> PackedWeight:
    """Pack [out, in] for this device; what oneDNN cannot do here (other devices and dtypes) keeps the plain layout."""
    if not _packable(weight):
        return PackedWeight(weight, None)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    keep = weight.dtype == torch.float32 and weight.numel() < _SMALL
    return PackedWeight(weight if keep else None, blocked)


def unpack_weight(weight: PackedWeight) -> Tensor:
    """The plain layout [out, in], restored bit for bit if it was given up."""
    if weight.plain is not None:
        return weight.plain
    if weight.blocked is None:
        raise ValueError("an empty PackedWeight")
    return weight.blocked.to_dense()


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [rows, in] times the packed weight's transpose, plus bias."""
    if weight.plain is not None and (weight.blocked is None or x.shape[0] == 1):
        return F.linear(x, weight.plain, bias)
    rows = x.shape[0]
    padding = computed_rows(rows) - rows
    padded = F.pad(x, (0, 0, 0, padding)) if padding else x
    y: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight.blocked, bias, "none", [], "")
    return y[:rows]


@cache
def computed_rows(rows: int) -> int:
    """The least row count that is computed and holds `rows`."""
    step = next(step for limit, step in _STEPS if rows <= limit)
    return -(-rows // step) * step


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
