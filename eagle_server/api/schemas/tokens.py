"""The bodies of /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from eagle_server.api.schemas.base import Body
from eagle_server.api.schemas.chat import Messages, Rendering
from eagle_server.api.schemas.generation import TokenIds


class TokenizeRequest(Rendering):
    """A prompt or messages. By default special tokens are added to a prompt; messages get them from the template."""

    expected: ClassVar[dict[str, str]] = {"prompt": "should be a string"}

    model: str | None = None
    messages: Messages | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if (self.prompt is None) == (self.messages is None):
            yield "prompt", "or messages: give exactly one of them"
        if self.messages is None and self.model_fields_set & Rendering.model_fields.keys():
            yield "prompt", "has no template: tools and the template's parameters belong to messages"


class DetokenizeRequest(Body):
    """Token ids to detokenize."""

    model: str | None = None
    tokens: TokenIds
