"""Emulates CUDA graphs on the CPU: it records the first call of a function, and a replay makes this call again.

Like a graph, a replay reads new contents of the old tensors, but no host values of later calls. So a function that
would replay stale lengths, masks or slots on a GPU also gives wrong results here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")


@dataclass(frozen=True)
class FirstCall:
    """The recorded call, and the tensors that hold its results. `spoiled`: tensors in memory that a replay uses."""

    function: Callable[[], Any]
    outputs: list[Tensor]
    spoiled: list[Tensor]

    def replay(self) -> None:
        for tensor in self.spoiled:
            spoil(tensor)
        self.write(self.function())

    def write(self, results: Any) -> None:
        for output, new in zip(self.outputs, tensors_of(results), strict=True):
            output.copy_(new)


class FirstCallRecorder:
    """A `eagle_server.worker.graphs.Recorder` with the worst that an allocator may do.

    Results of a capture lie in memory that the pool's earlier captures used for temporary values. So a replay spoils
    the results of all later captures in its pool. Results in memory of the function's own stay there, as in a graph.
    """

    def __init__(self) -> None:
        self.pools: defaultdict[str, list[FirstCall]] = defaultdict(list)

    def record(self, function: Callable[[], Output], pool: str) -> tuple[Callable[[], None], Output]:
        results, again = function(), tensors_of(function())
        fixed = {tensor.data_ptr() for tensor in again} & {tensor.data_ptr() for tensor in tensors_of(results)}
        outputs = own(results, fixed)
        made = [tensor for tensor in tensors_of(outputs) if tensor.data_ptr() not in fixed]
        for tensor in made:
            spoil(tensor)
        call = FirstCall(function, tensors_of(outputs), [])
        for earlier in self.pools[pool]:
            earlier.spoiled.extend(made)
        self.pools[pool].append(call)
        return call.replay, outputs

    @property
    def kept_bytes(self) -> int:
        """What the results of all captures take."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for calls in self.pools.values()
            for call in calls
            for tensor in call.outputs
        }
        return sum(storages.values())


def spoil(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


def own(value: Any, fixed: Collection[int] = ()) -> Any:
    """The same structure with copies of its tensors, except those at the addresses `fixed`."""
    if isinstance(value, Tensor):
        return value if value.data_ptr() in fixed else value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{each.name: own(getattr(value, each.name), fixed) for each in fields(value)})
    return tuple(own(each, fixed) for each in value) if isinstance(value, tuple) else value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a tensor, dataclass or tuple, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for each in fields(value) for tensor in tensors_of(getattr(value, each.name))]
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, tuple) else []
