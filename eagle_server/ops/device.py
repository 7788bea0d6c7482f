"""What the host must know of a device, and copies to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops import triton_support


def mirrors(device: torch.device) -> bool:
    """Whether the host's arrays are copied to the device, which computes while the host goes on. A CPU does neither."""
    return device.type != "cpu"


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is ordered by CUDA's streams and events."""
    return device.type == "cuda"


def on_gpu(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` runs its Triton kernel rather than its torch twin."""
    return triton_support.HAS_TRITON and tensor.is_cuda


def upload(values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`values` (numbers, equally shaped nested sequences, or an array) as a tensor on `device`.

    Never synchronizes: the copy is asynchronous, from pinned memory.
    """
    tensor = torch.as_tensor(np.asarray(values), dtype=dtype)  # numpy reads nested lists three times as fast
    return tensor.pin_memory().to(device, non_blocking=True) if mirrors(device) else tensor
