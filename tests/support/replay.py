"""A stand-in for CUDA graphs on the CPU: the first call is recorded and made again, whatever the later ones bring.

Like a graph it sees new tensor contents in the old tensors and none of the host values of later calls; so a function
that would replay stale lengths, masks or slots on a GPU gives wrong results here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")


@dataclass(frozen=True)
class FirstCall:
    """The recorded call, and the tensors in which its results lie."""

    function: Callable[[], Any]
    outputs: list[Tensor]

    def replay(self) -> None:
        for kept, fresh in zip(self.outputs, tensors_of(self.function()), strict=True):
            kept.copy_(fresh)


class FirstCallRecorder:
    """See `eagle_server.worker.graphs.Recorder`. Results are poisoned until the first replay."""

    def record(self, function: Callable[[], Output]) -> tuple[FirstCall, Output]:
        outputs = own(function())
        for tensor in tensors_of(outputs):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        return FirstCall(function, tensors_of(outputs)), outputs


def own(value: Any) -> Any:
    """The same structure with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{each.name: own(getattr(value, each.name)) for each in fields(value)})
    return tuple(own(each) for each in value) if isinstance(value, tuple) else value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a tensor, dataclass or tuple, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for each in fields(value) for tensor in tensors_of(getattr(value, each.name))]
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, tuple) else []
