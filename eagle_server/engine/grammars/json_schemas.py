"""JSON schemas without the keywords that have no effect by the standard, but that llguidance refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)  # that llguidance enforces
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)  # map names to schemas
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})  # have values that are no schemas


def simplified(schema: Any) -> Any:
    """The schema without keywords that have no effect, in all its parts. Values that are data stay as they are."""
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
        elif not _has_no_effect(key, value):
            parts[key] = simplified(value)
    return parts


def _has_no_effect(key: str, value: Any) -> bool:
    return key == "format" and isinstance(value, str) and value not in FORMATS


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
