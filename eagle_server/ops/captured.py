"""Dataclasses as inputs and outputs of captured functions: their tensors are read and exchanged.

A value's structure is walked once, at capture. Later calls read and build by what the walk has found.

Values other than tensors, and `in_place()` fields, are fixed at capture: all calls with one key must have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor

Getter = Callable[[Any], Any]


def in_place() -> Any:
    """A dataclass field whose tensors are read where they are, in every call the same ones."""
    return field(metadata={"in_place": True})


class TensorReader:
    """Reads the tensors of tuples and dataclasses that have the structure of `value`."""

    def __init__(self, value: Any) -> None:
        self._tensors: list[Getter] = []
        self._kinds: list[tuple[Getter, Any]] = []  # of containers, and of what is None
        self._walk(value, ())

    def read(self, value: Any) -> list[Tensor]:
        """Its tensors, in order.

        Raises:
            ValueError: it has another structure.
        """
        for get, kind in self._kinds:
            if (found := _kind(get(value))) != kind:
                raise ValueError(f"{kind} was captured, not {found}")
        return [get(value) for get in self._tensors]

    def _walk(self, value: Any, path: tuple[Getter, ...]) -> None:
        if isinstance(value, Tensor):
            self._tensors.append(_along(path))
        elif (parts := _parts(value)) is not None:
            self._kinds.append((_along(path), _kind(value)))
            for step, part in parts:
                self._walk(part, (*path, step))


def builder(value: Any, tensors: Iterator[Tensor] | None = None) -> Callable[[], Any]:
    """A function that makes copies of `value`. They hold `tensors`, in the order of `TensorReader`; None: the same.

    Each copy is a new object, without what earlier ones have computed (cached_property).
    """
    if isinstance(value, Tensor):
        return _constant(value if tensors is None else next(tensors))
    if isinstance(value, tuple):
        entries = [builder(entry, tensors) for entry in value]
        return lambda: tuple([build() for build in entries])
    if not is_dataclass(value) or isinstance(value, type):
        return _constant(value)
    copied = {name: builder(getattr(value, name), tensors) for name in _copied(value)}
    return _dataclass_builder(type(value), {each.name: getattr(value, each.name) for each in fields(value)}, copied)


def _dataclass_builder(
    kind: type, values: Mapping[str, Any], copied: Mapping[str, Callable[[], Any]]
) -> Callable[[], Any]:
    def build() -> Any:
        made: Any = object.__new__(kind)
        made.__dict__.update(values)
        made.__dict__.update({name: build() for name, build in copied.items()})
        return made

    return build


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _parts(value: Any) -> Sequence[tuple[Getter, Any]] | None:
    """What a tuple, a dataclass or None holds, each with its getter; None: it is another value."""
    if value is None:
        return ()
    if isinstance(value, tuple):
        return [(itemgetter(place), entry) for place, entry in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(attrgetter(name), getattr(value, name)) for name in _copied(value)]
    return None


def _copied(value: Any) -> list[str]:
    return [part.name for part in fields(value) if "in_place" not in part.metadata]


def _along(path: Sequence[Getter]) -> Getter:
    def get(value: Any) -> Any:
        for step in path:
            value = step(value)
        return value

    return get


def _kind(value: Any) -> Any:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value)
