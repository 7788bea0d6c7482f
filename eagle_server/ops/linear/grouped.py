"""Grouped matrix products for a mixture of experts: each group of rows has its own weight.

torch's grouped_mm reads the ends of the groups on the device, so a CUDA graph can capture it. It needs bfloat16 on
GPUs, and rows of a multiple of 16 bytes everywhere. All other cases use the torch twin.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 16  # bytes
_GATHERED = 1 << 24  # elements of gathered weights that the twin holds at a time
_GPUS = (9, 10)  # major compute capabilities with a kernel
_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def group_ends(sorted_groups: Tensor, groups: int) -> Tensor:
    """The end of each group in rows that are sorted by group: int64 [rows] -> int32 [groups]."""
    numbers = torch.arange(groups, device=sorted_groups.device)
    return torch.searchsorted(sorted_groups, numbers, right=True, out_int32=True)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [rows, in] sorted by group, weight [groups, out, in], ends int32 [groups] -> [rows, out].

    The result of row i in group g is weight[g] @ x[i].
    """
    if torch.is_autocast_enabled(x.device.type):  # in trainings; autocast itself does not know grouped_mm
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if _is_supported(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return grouped_linear_twin(x, weight, ends)


def grouped_linear_twin(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` for all dtypes and sizes. It gathers one weight per row, for a few rows at a time."""
    groups = torch.searchsorted(ends, torch.arange(len(x), dtype=ends.dtype, device=x.device), right=True)
    step = max(1, _GATHERED // weight[0].numel())
    parts = zip(x.split(step), groups.split(step), strict=True)
    return torch.cat([torch.bmm(weight.index_select(0, ids), rows.unsqueeze(2)).squeeze(2) for rows, ids in parts])


def _is_supported(x: Tensor, weight: Tensor) -> bool:
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    if x.is_cuda:  # other GPUs loop over the groups on the host, which a CUDA graph cannot capture
        return aligned and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in _GPUS
    return aligned and x.dtype in _CPU_DTYPES
