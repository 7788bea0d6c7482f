"""Dataclasses as inputs of captured functions: flattened to their tensors, and restored with others.

Values other than tensors, and `in_place()` fields, are fixed at capture: all calls with one key must have the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, field, fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def in_place() -> Any:
    """A dataclass field whose tensors are read where they are, in every call the same ones."""
    return field(metadata={"in_place": True})


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of an input: itself, or those of its fields and entries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for entry in value:
            yield from tensors_of(entry)
    elif is_dataclass(value):
        for name in _copied(value):
            yield from tensors_of(getattr(value, name))


def restored(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of the input that holds these tensors instead, in the order of `tensors_of`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(restored(entry, tensors) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: restored(getattr(value, name), tensors) for name in _copied(value)})
    return value


def _copied(value: Any) -> list[str]:
    parts: tuple[Field[Any], ...] = fields(value)
    return [part.name for part in parts if "in_place" not in part.metadata]
