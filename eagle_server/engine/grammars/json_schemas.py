"""JSON schemas as llguidance takes them.

Keywords that have no effect by the standard are left out, since llguidance refuses some. Bounds beyond 2^53 are
rounded, since llguidance reads numbers as float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from eagle_server.text.tools.grammars import STRING_FORMATS

_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)  # map names to schemas
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})  # have values that are no schemas
_NEEDED = {
    **{"then": {"if"}, "else": {"if"}, "if": {"then", "else"}},
    **{"minContains": {"contains"}, "maxContains": {"contains"}},
}  # keywords that have no effect without one of these
_ANCHORS = frozenset({"$dynamicAnchor", "$recursiveAnchor"})  # only references to them matter, and these are refused
_SIDES = (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1))
_EXACT = 2**53  # llguidance reads smaller integers as they are
_INT64 = 2**63 - 1
_UNREAD = 2**64  # no bound beyond it can be enforced


def simplified(schema: Any) -> Any:
    """The schema as llguidance takes it, in all its parts. Values that are data stay as they are."""
    if isinstance(schema, list):
        return [simplified(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {}
    for key, value in schema.items():
        if key in _VALUES:
            parts[key] = value
        elif key in _NAMED and isinstance(value, dict):
            parts[key] = {name: simplified(part) for name, part in value.items()}
        else:
            parts[key] = simplified(value)
    parts = {key: value for key, value in parts.items() if not _has_no_effect(key, value)}
    for key, others in _NEEDED.items():
        if not parts.keys() & others:
            parts.pop(key, None)
    if type(parts.get("minContains")) is int and parts["minContains"] == 0 and "maxContains" not in parts:
        del parts["minContains"]
        parts.pop("contains", None)
    _round_bounds(parts)
    return parts


def _has_no_effect(key: str, value: Any) -> bool:
    match key:
        case "format":
            return isinstance(value, str) and value not in STRING_FORMATS
        case "uniqueItems" | "not":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems" | "propertyNames" | "then" | "else":
            return _allows_all(value)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(part == [] or _allows_all(part) for part in value.values())
        case "$schema":  # an unknown dialect is read as the newest draft
            return isinstance(value, str) and "://json-schema.org/draft" not in value
    return key in _ANCHORS


def _allows_all(schema: Any) -> bool:
    return schema is True or schema == {}


def _round_bounds(schema: dict[str, Any]) -> None:
    """Round bounds beyond 2^53 to float64, so that no number outside them is allowed.

    A range that has all of int64 on one side has no bound there: llguidance cannot build it. An integer's maximum
    2^63 - 1 is the exception: llguidance enforces it.
    """
    kinds = schema.get("type")
    is_integer = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    for inclusive, exclusive, sign in _SIDES:
        for key in (inclusive, exclusive):
            bound = schema.get(key)
            if not _is_number(bound) or abs(bound) <= _EXACT:
                continue
            del schema[key]
            is_strict = key == exclusive
            if schema.get(exclusive) is True:  # the form of draft 4
                is_strict = True
                del schema[exclusive]
            if is_integer and sign > 0 and int(bound) - is_strict == _INT64:
                rounded = _INT64
            elif sign * bound >= _INT64:
                continue
            else:
                rounded = _inward(bound, sign, is_strict=is_strict, is_integer=is_integer)
            other = schema.get(inclusive, rounded)
            schema[inclusive] = sign * min(sign * rounded, sign * other) if _is_number(other) else other


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _inward(bound: float, sign: int, *, is_strict: bool, is_integer: bool) -> int:
    """The nearest float64 within a bound beyond 2^53, where all of them are integers."""
    if abs(bound) > _UNREAD:
        return int(bound)
    nearest, last = float(bound), sign * int(bound) - is_strict
    # llguidance takes the value in a range of integers, and the shortest digits in a range of numbers.
    while sign * int(nearest) > last or not (is_integer or sign * int(Decimal(repr(nearest))) <= last):
        nearest = math.nextafter(nearest, -sign * math.inf)
    return int(nearest)


def places(schema: Any, keywords: set[str], path: str = "#") -> Iterator[str]:
    """JSON pointers to the keywords in a schema."""
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from places(part, keywords, f"{path}/{number}")
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        place = f"{path}/{_escaped(key)}"
        if key in keywords:
            yield place
        elif key in _NAMED and isinstance(value, Mapping):
            for name, part in value.items():
                yield from places(part, keywords, f"{place}/{_escaped(name)}")
        elif key not in _VALUES:
            yield from places(value, keywords, place)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
