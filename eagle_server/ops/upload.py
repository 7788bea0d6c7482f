"""Copies from host to device without a synchronization: through pinned memory, asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`values` (numbers, equally shaped nested sequences, or an array) as a tensor on `device`. Never synchronizes."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
