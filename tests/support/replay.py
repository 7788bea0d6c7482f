"""Emulates CUDA graphs on the CPU: it records the first call of a function, and a replay makes this call again.

Like a graph, a replay reads new contents of the old tensors, but no host values of later calls. So a function that
would replay stale lengths, masks or slots on a GPU also gives wrong results here.
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
    """The recorded call, and the tensors that hold its results."""

    function: Callable[[], Any]
    outputs: list[Tensor]

    def replay(self) -> None:
        for output, new in zip(self.outputs, tensors_of(self.function()), strict=True):
            output.copy_(new)


class FirstCallRecorder:
    """A `eagle_server.worker.graphs.Recorder`. Results are poisoned until the first replay."""

    def record(self, function: Callable[[], Output], *, apart: bool) -> tuple[FirstCall, Output]:  # noqa: ARG002
        outputs = own(function())
        for tensor in tensors_of(outputs):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        return FirstCall(function, tensors_of(outputs)), outputs


def own(value: Any) -> Any:
    """The same structure with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{each.name: own(getattr(value, each.name)) for each in fields(value)})
    return tuple(own(each) for each in value) if isinstance(value, tuple) else value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a tensor, dataclass or tuple, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for each in fields(value) for tensor in tensors_of(getattr(value, each.name))]
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, tuple) else []
