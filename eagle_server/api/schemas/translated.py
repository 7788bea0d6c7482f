"""Bodies of other APIs, which are translated to a chat."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError, PydanticUndefined

from eagle_server.api.schemas.base import TEXT_ONLY, Body
from eagle_server.api.schemas.chat import ChatRequest, Message, Values
from eagle_server.api.schemas.generation import SamplingBody

LONGEST_TYPE = 40  # characters of a type that an error repeats
_MEDIA = re.compile(r"image|video|audio|file|document")


class TranslatedBody(Body):
    """A body that has a chat's meaning. `names` maps the chat's parameters to its own, for errors."""

    names: ClassVar[Mapping[str, str]] = {}

    @property
    def messages_of_chat(self) -> list[Message]:
        raise NotImplementedError

    @property
    def chat_parameters(self) -> Values:
        """The chat's parameters without its messages and the parameters of SamplingBody. None: not given."""
        raise NotImplementedError

    @cached_property
    def chat(self) -> ChatRequest:
        shared = self.model_fields_set & SamplingBody.model_fields.keys()
        sampling = {name: getattr(self, name) for name in shared}
        chat = ChatRequest.model_validate({**sampling, **self.chat_parameters, "messages": self.messages_of_chat})
        chat._names = self.names
        return chat

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if not self.messages_of_chat:
            yield self.names.get("messages", "messages"), "has nothing to answer"
        yield from self.chat.problems()


def typed(
    *kinds: str,
    default: str | None = None,
    of_text: Callable[[str], Values] | None = None,
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

    def entry(number: int, value: Any) -> Values:
        if not isinstance(value, dict):
            raise PydanticCustomError("object", "entry {number} should be an object", {"number": number})
        kind = value.get("type") or default
        if kind not in kinds:
            context = {"number": number, "kind": repr(kind)[:LONGEST_TYPE], "kinds": ", ".join(kinds)}
            context["reads"] = f"{TEXT_ONLY}; " if _MEDIA.search(str(kind)) else ""
            raise PydanticCustomError("type", "entry {number} is of type {kind}; {reads}supported: {kinds}", context)
        return {**value, "type": kind}

    return BeforeValidator(check, json_schema_input_type=schema)


def with_system(texts: Sequence[str], messages: Sequence[Message]) -> list[Message]:
    """Join `texts` and the leading system messages into one system message. The other messages follow.

    Many templates allow only one system message.
    """
    begin = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    system = [text for text in (*texts, *(message.text for message in begin)) if text]
    lead = [Message(role="system", content="\n\n".join(system))] if system else []
    return [*lead, *messages[len(begin) :]]
