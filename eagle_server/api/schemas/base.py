"""Base classes of request bodies, and parsing. An invalid body becomes one error that names the parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from eagle_server.api.errors import ApiError, bad_request

B = TypeVar("B", bound="Body")

MAX_ITEMS = 2**19  # commas: list items and object members; parsing as many numbers takes about 40 ms
MAX_NESTED = 2**16  # lists, objects and keys, which take longer
_CHUNK = 2**16  # bytes
_OPENINGS = (b"[", b"{", b":")

TEXT_ONLY = "this server reads text only"  # in every answer to images, audio and files


class Part(BaseModel):
    """An object in a body. A null parameter counts as not given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Also drop all unknown parameters except one, since pydantic makes an error of each."""
        if not isinstance(values, dict):
            return values
        known = _names(cls)
        present = {name: value for name, value in values.items() if value is not None}
        unknown = [name for name in present if name not in known]
        for name in unknown[1:]:
            del present[name]
        return present


class Body(Part):
    """A whole body.

    `neutral` maps parameters of other servers that are not supported to the values that have no effect. These values
    are accepted. `advice` says for some of these parameters what to do instead. `aliases` maps other names of
    parameters to a parameter and its field. `expected` has the error message of parameters with several types, in place
    of one message per type.
    """

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    advice: ClassVar[dict[str, str]] = {}
    aliases: ClassVar[dict[str, tuple[str, str]]] = {}
    expected: ClassVar[dict[str, str]] = {}

    _size: int = PrivateAttr(0)
    _names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def size(self) -> int:
        """Size of the JSON text in bytes."""
        return self._size

    def name(self, parameter: str) -> str:
        """A parameter's name in errors. It differs if this body was translated from another API's."""
        return self._names.get(parameter, parameter)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Violated rules between parameters, as (parameter, problem)."""
        yield from ()


class TooManyValues(ValueError):
    """A JSON text has more values than the limits allow."""


class JsonSize:
    """Counts the values of a JSON text that arrives in chunks. What strings contain does not count.

    A parser builds an object for every value and holds the interpreter lock until the last one, so a body of few
    megabytes would stop all streams for seconds. Counting before takes a millisecond per megabyte, one chunk at a time.
    """

    def __init__(self) -> None:
        self._items = self._nested = 0
        self._is_in_string = False
        self._escape = b""  # a backslash at the end of the last chunk, whose character is in the next one

    def add(self, chunk: bytes) -> None:
        """
        Raises:
            TooManyValues: the text has more values than the limits allow.
        """
        text = self._escape + chunk
        backslashes = len(text) - len(text.rstrip(b"\\"))
        self._escape = text[len(text) - backslashes % 2 :]
        if self._is_in_string and b'"' not in text:
            return  # a part of a long string, the most frequent case in large bodies
        # Without escaped quotes, every second piece between quotes is outside of strings.
        text = text[: len(text) - backslashes % 2].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = text.split(b'"')
        outside = b"".join(pieces[self._is_in_string :: 2])
        self._is_in_string ^= len(pieces) % 2 == 0
        self._items += outside.count(b",")
        self._nested += sum(map(outside.count, _OPENINGS))
        if self._items > MAX_ITEMS:
            raise TooManyValues(f"more than {MAX_ITEMS} items in its lists and objects")
        if self._nested > MAX_NESTED:
            raise TooManyValues(f"more than {MAX_NESTED} lists, objects and keys")


def check_size(text: str) -> None:
    """
    Raises:
        TooManyValues: the JSON text has more values than the limits allow.
    """
    size, data = JsonSize(), text.encode()
    for start in range(0, len(data), _CHUNK):
        size.add(data[start : start + _CHUNK])


def parse(model: type[B], body: bytes) -> B:
    """The validated body.

    Raises:
        ApiError: status 400, naming the parameter.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise bad_request("the body should be a JSON object")
    for name in model.neutral.keys() & values.keys():
        value = values.pop(name)
        if value is not None and not _is_one_of(value, model.neutral[name]):
            advice = f": {model.advice[name]}" if name in model.advice else ""
            raise bad_request(f"{name} is not supported{advice}", name, "unsupported_parameter")
    for name in model.aliases.keys() & values.keys():
        if (value := values.pop(name)) is not None:
            parameter, field = model.aliases[name]
            if values.get(parameter) is not None:
                raise bad_request(f"{name} and {parameter} ask for two things; drop one of them", name, "invalid_value")
            values[parameter] = {field: value}
    try:
        request = model.model_validate(values)
    except ValidationError as error:
        raise _refusal(model, error.errors(include_url=False, include_input=False)[0]) from None
    for name, problem in request.problems():
        raise bad_request(f"{name} {problem}", name, "invalid_value")
    request._size = len(body)
    return request


@cache
def _names(part: type[Part]) -> frozenset[str]:
    """The names of its parameters in JSON."""
    return frozenset(field.alias or name for name, field in part.model_fields.items())


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed)


def _refusal(model: type[Body], error: ErrorDetails) -> ApiError:
    name = ".".join(str(part) for part in error["loc"]) or None
    top = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "missing":
        return bad_request(f"{name} is required", name, "missing_parameter")
    if error["type"] == "extra_forbidden":
        return bad_request(f"unknown parameter {name}", name, "unknown_parameter")
    if top in model.expected:
        return bad_request(f"{top} {model.expected[top]}", top, "invalid_value")
    return bad_request(f"{name}: {error['msg']}", name, "invalid_value")
