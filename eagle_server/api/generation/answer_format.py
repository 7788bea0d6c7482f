"""How a chat's output is taken apart: thinking, then content and tool calls. Grammars apply after thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from eagle_server.api.generation.tools import ToolUse
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.request import Grammar
from eagle_server.text.markers import special_markers
from eagle_server.text.reasoning_formats import ReasoningFormat
from eagle_server.text.reasoning_parser import ReasoningParser
from eagle_server.text.tokenizer import Tokenizer
from eagle_server.text.tool_parser import ToolCallParser


@dataclass(frozen=True)
class ReasoningSyntax:
    """The served model's reasoning format. `markers` are its markers that are special tokens, by token id."""

    format: ReasoningFormat
    markers: Mapping[int, str]

    @classmethod
    def of(cls, format: ReasoningFormat, tokenizer: Tokenizer) -> ReasoningSyntax:
        return cls(format, special_markers(format.markers, tokenizer))


@dataclass(frozen=True)
class Reasoning:
    """The thinking of one request, see `ReasoningParser`."""

    syntax: ReasoningSyntax
    is_open: bool | None
    separate: bool
    stream: bool


@dataclass(frozen=True)
class AnswerFormat:
    """`reasoning` is None where no thinking is expected, `tools` where no tool calls are looked for."""

    reasoning: Reasoning | None = None
    tools: ToolUse | None = None

    @property
    def markers(self) -> Mapping[int, str]:
        """Markers that are special tokens, by token id."""
        parts = (self.reasoning, self.tools)
        return {token: text for part in parts if part is not None for token, text in part.syntax.markers.items()}

    def parser(self) -> ReasoningParser | ToolCallParser | None:
        """A new parser, for one choice."""
        calls, own = None if self.tools is None else self.tools.parser(), self.reasoning
        if own is None:
            return calls
        return ReasoningParser(own.syntax.format, calls, is_open=own.is_open, separate=own.separate, stream=own.stream)

    def grammar(self, given: Grammar | None) -> Grammar | None:
        """The grammar of the whole output: that of the tool calls, else the `given` one, after the thinking."""
        grammar = given if self.tools is None or self.tools.grammar is None else self.tools.grammar
        if grammar is None or self.reasoning is None:
            return grammar
        syntax = self.reasoning.syntax
        tokens = {text: token for token, text in syntax.markers.items()}
        return msgspec.structs.replace(grammar, thinking=syntax.format.lark(tokens, is_open=self.reasoning.is_open))


PLAIN = AnswerFormat()


def answer_format(
    body: ChatRequest, prompt: str, syntax: ReasoningSyntax | None, tools: ToolUse | None
) -> AnswerFormat:
    """The format of the answer to a chat, whose text under the template is `prompt`."""
    if syntax is None:
        return AnswerFormat(tools=tools)
    reply = body.messages[-1].text if body.continue_final_message else None
    is_open = syntax.format.state_after(prompt, reply=reply)
    if is_open is False:
        return AnswerFormat(tools=tools)
    return AnswerFormat(Reasoning(syntax, is_open, body.separate_reasoning, body.stream_reasoning), tools)
