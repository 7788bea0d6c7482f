"""The operations of a forward that wait for the device. A function with one of them cannot be a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_WAIT = {
    aten.item.default,  # under inference mode; and bool(tensor)
    aten._local_scalar_dense.default,
    aten.where.default,  # the form that gives indices
    aten.argwhere.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
}
_COPIES = {aten._to_copy.default, aten.copy_.default}


def waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation reads a value of the device on the host, or needs one for the size of what it gives."""
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if func in (aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor):
        return kwargs.get("output_size") is None
    return func in _WAIT


class HostReads(TorchDispatchMode):
    """Collects the names of the operations that wait, or copy between host and device, while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = (*args, out) if func in _COPIES else ()
        devices = {tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)}
        if len(devices) > 1 or func is aten.lift_fresh.default or waits(func, args, kwargs or {}):
            self.operations.append(str(func))  # lift_fresh: torch.tensor(numbers), which are on the host
        return out
