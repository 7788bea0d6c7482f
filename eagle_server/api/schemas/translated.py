"""Bodies of other APIs, which are translated to a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import ClassVar

from eagle_server.api.schemas.base import Body
from eagle_server.api.schemas.chat import ChatRequest, Message, Values
from eagle_server.api.schemas.generation import SamplingBody


class TranslatedBody(Body):
    """A body that has a chat's meaning. `names` maps the chat's parameters to its own, for errors.

    `requires_max_tokens`: clients must send max_tokens, so it is always lowered to what fits.
    """

    names: ClassVar[Mapping[str, str]] = {}
    requires_max_tokens: ClassVar[bool] = False

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


def with_system(texts: Sequence[str], messages: Sequence[Message]) -> list[Message]:
    """Join `texts` and the leading system messages into one system message. The other messages follow.

    Many templates allow only one system message.
    """
    begin = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    system = [text for text in (*texts, *(message.text for message in begin)) if text]
    lead = [Message(role="system", content="\n\n".join(system))] if system else []
    return [*lead, *messages[len(begin) :]]
