"""Base classes of request bodies, and parsing. An invalid body becomes one error that names the parameter."""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, PydanticUndefined, from_json

from eagle_server.api.errors import ApiError, bad_request

B = TypeVar("B", bound="Body")

MAX_ITEMS = 2**19  # commas: list items and object members; parsing as many numbers takes about 40 ms
MAX_NESTED = 2**16  # lists, objects and keys, which take longer
_CHUNK = 2**16  # bytes
_OPENINGS = (b"[", b"{", b":")

TEXT_ONLY = "this server reads text only"  # in every answer to images, audio and files
LONGEST_NAME = 40  # characters of a client's word that an error or the log repeats
MEDIA_FIELDS = frozenset({"image", "images", "audio", "video", "videos", "file", "files", "file_ids", "attachments"})
_MEDIA = re.compile(r"image|video|audio|file|document")
_NAMED = 64  # ignored fields that the log names

logger = logging.getLogger(__name__)
_ignored: set[str] = set()  # the names of fields that were ignored, each logged once


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


class Copied(Part):
    """An object of the conversation, which clients copy from earlier answers of this server or of others.

    Nothing in it decides how the answer is generated, so fields without a meaning here are ignored. Their names are
    logged, once each. What a text model cannot read is refused.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = _names(cls)
        for name, value in values.items():
            if name not in known and value:
                if name in MEDIA_FIELDS:
                    raise PydanticCustomError("media", TEXT_ONLY, {"key": name[:LONGEST_NAME]})
                _note_ignored(name)
        return {name: value for name, value in values.items() if value is not None and name in known}


def _note_ignored(name: str) -> None:
    if name not in _ignored and len(_ignored) < _NAMED:
        _ignored.add(name)
        logger.info("fields of messages and tools that are ignored: %r", name[:LONGEST_NAME])


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
    _memory: int = PrivateAttr(0)
    _names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def size(self) -> int:
        """Size of the JSON text in bytes."""
        return self._size

    @property
    def memory(self) -> int:
        """Bytes that its texts take at most: a single emoji makes every character of a text four bytes long."""
        return self._memory

    def name(self, parameter: str) -> str:
        """A parameter's name in errors. It differs if this body was translated from another API's."""
        return self._names.get(parameter, parameter)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Violated rules between parameters, as (parameter, problem)."""
        yield from ()


def typed(
    *kinds: str,
    default: str | None = None,
    of_text: Callable[[str], dict[str, Any]] | None = None,
    schema: Any = PydanticUndefined,
) -> BeforeValidator:
    """A check of a list of objects that differ by `type`. An error names the first type that is not among `kinds`.

    `default`: the type of objects without one. `of_text` allows a text instead of the list, and makes its object; then
    `schema` is the type that /openapi.json shows.
    """

    def check(content: Any) -> Any:
        values = [of_text(content)] if isinstance(content, str) and of_text is not None else content
        if not isinstance(values, list):
            raise PydanticCustomError("list", "should be a list" if of_text is None else "should be a string or a list")
        return [entry(number, value) for number, value in enumerate(values)]

    def entry(number: int, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise PydanticCustomError("object", "entry {number} should be an object", {"number": number})
        kind = value.get("type") or default
        if kind not in kinds:
            context = {"number": number, "kind": repr(kind)[:LONGEST_NAME], "kinds": ", ".join(kinds)}
            context["reads"] = f"{TEXT_ONLY}; " if _MEDIA.search(str(kind)) else ""
            raise PydanticCustomError("type", "entry {number} is of type {kind}; {reads}supported: {kinds}", context)
        return {**value, "type": kind}

    return BeforeValidator(check, json_schema_input_type=schema)


def known(values: dict[str, Any], part: type[Part]) -> dict[str, Any]:
    """The fields that `part` has, in their order. Null counts as not given."""
    return {name: value for name, value in values.items() if value is not None and name in _names(part)}


def each_checked(part: type[Part], values: list[Any], first: int = 0) -> None:
    """Check a list of objects that stay as they are. `first`: the number of the first one.

    Raises:
        ValidationError: the first one that is no `part`, with its number.
    """
    for number, value in enumerate(values, first):
        try:
            part.model_validate(value)
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
            kind: Any = found["type"]
            if kind not in ("missing", "extra_forbidden"):
                key = found.get("ctx", {}).get("key")
                kind = PydanticCustomError(kind, found["msg"], None if key is None else {"key": key})
            place = InitErrorDetails(type=kind, loc=(number, *found["loc"]), input=found["input"])
            raise ValidationError.from_exception_data(part.__name__, [place]) from None


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
        values = from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
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
    is_narrow = body.isascii() and (b"\\" not in body or b"\\u" not in body)  # the first search is 30 times as fast
    request._memory = len(body) * (1 if is_narrow else 4)
    return request


@cache
def _names(part: type[Part]) -> frozenset[str]:
    """The names of its parameters in JSON."""
    return frozenset(field.alias or name for name, field in part.model_fields.items())


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed)


def _refusal(model: type[Body], error: ErrorDetails) -> ApiError:
    key = error.get("ctx", {}).get("key")
    places = [str(part) for part in error["loc"]] + ([] if key is None else [key])
    name = ".".join(place for place in places if not place.startswith("#")) or None
    top = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "missing":
        return bad_request(f"{name} is required", name, "missing_parameter")
    if error["type"] == "extra_forbidden":
        return bad_request(f"unknown parameter {name}", name, "unknown_parameter")
    if top in model.expected:
        return bad_request(f"{top} {model.expected[top]}", top, "invalid_value")
    return bad_request(f"{name}: {error['msg']}", name, "invalid_value")
