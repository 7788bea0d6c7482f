"""The one place where device values become Python values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.device import has_streams


def to_host(*tensors: Tensor) -> tuple[Any, ...]:
    """Tensors as nested lists. From a GPU they come in one copy."""
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    return HostCopy(named).lists(*named)


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    """The order in which tensors stand in one buffer, so that all are aligned."""
    return sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of the tensors, one after the other."""
    flats = [tensors[number].contiguous().view(-1).view(torch.uint8) for number in _widest_first(tensors)]
    return torch.cat(flats)


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors `like`, from their bytes."""
    order = _widest_first(like)
    pieces = packed.split([like[number].nbytes for number in order])
    tensors = dict(zip(order, pieces, strict=True))
    return [tensors[number].view(each.dtype).view(each.shape) for number, each in enumerate(like)]


class HostCopy:
    """One copy of tensors to the host that runs beside the device's later work. On a CPU nothing is copied."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._end: torch.cuda.Event | None = None  # of the copy; None: it is over
        if tensors and has_streams(next(iter(tensors.values())).device):
            given = tuple(tensors.values())
            flat = _packed(given)
            pinned = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat, non_blocking=True)
            self._end = torch.cuda.Event()
            self._end.record()
            self._tensors = dict(zip(tensors, _unpacked(pinned, given), strict=True))  # before the host must wait

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def lists(self, *names: str) -> tuple[Any, ...]:
        """The tensors of these names as nested lists. Waits for the copy, not for later work."""
        arrived = self._arrived()
        return tuple(arrived[name].tolist() for name in names)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as an array, on a CPU of the same memory. Waits as `lists`."""
        array: NDArray[Any] = self._arrived()[name].numpy()
        return array

    def _arrived(self) -> Mapping[str, Tensor]:
        if self._end is not None:
            self._end.synchronize()
            self._end = None
        return self._tensors


def is_finite(value: Tensor) -> bool:
    return math.isfinite(value.item())


def leading_finite(values: Tensor, places: Sequence[int]) -> int:
    """How many of `values` at these places are finite before the first that is not."""
    finite = values[list(places)].isfinite().tolist()
    return len(finite) if all(finite) else finite.index(False)
