"""How a chat's output is parsed: thinking, then content and tool calls. Grammars apply after thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from eagle_server.api.generation.tools import ToolUse
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.request import Grammar
from eagle_server.text.chat_template import TemplateStops
from eagle_server.text.markers import Syntax
from eagle_server.text.reasoning_formats import ReasoningFormat
from eagle_server.text.reasoning_parser import ChannelParser, ReasoningParser
from eagle_server.text.tokenizer import Tokenizer
from eagle_server.text.tool_parser import ToolCallParser


@dataclass(frozen=True)
class Reasoning:
    """The thinking of one request, see `ReasoningParser`."""

    syntax: Syntax[ReasoningFormat]
    is_open: bool | None
    separate: bool
    stream: bool


@dataclass(frozen=True)
class AnswerFormat:
    """How to parse one answer. `reasoning` is None if no thinking is expected, `tools` if tool calls are not parsed."""

    reasoning: Reasoning | None = None
    tools: ToolUse | None = None

    @property
    def markers(self) -> Mapping[int, str]:
        """Markers that are special tokens, by token id."""
        parts = (self.reasoning, self.tools)
        return {token: text for part in parts if part is not None for token, text in part.syntax.markers.items()}

    def parser(self) -> ReasoningParser | ToolCallParser | None:
        """A new parser, for one choice."""
        calls, reasoning = None if self.tools is None else self.tools.parser(), self.reasoning
        if reasoning is None:
            return calls
        format = reasoning.syntax.format
        kind = ChannelParser if format.channels else ReasoningParser
        return kind(format, calls, is_open=reasoning.is_open, separate=reasoning.separate, stream=reasoning.stream)

    def grammar(self, requested: Grammar | None) -> Grammar | None:
        """The grammar of the whole output: of the thinking, then of the tool calls, else the `requested` one."""
        is_call = self.tools is not None and self.tools.grammar is not None
        grammar = self.tools.grammar if self.tools is not None and is_call else requested
        if grammar is None or self.reasoning is None:
            return grammar
        syntax = self.reasoning.syntax
        thinking = syntax.format.lark(syntax.tokens, is_open=self.reasoning.is_open, is_call=is_call)
        return msgspec.structs.replace(grammar, thinking=thinking)

    def stops(self, template: TemplateStops, tokenizer: Tokenizer) -> TemplateStops:
        """The template's stops, and the end tokens of this format."""
        ends = () if self.reasoning is None else map(tokenizer.token_id, self.reasoning.syntax.format.ends)
        return replace(template, token_ids=(*template.token_ids, *(end for end in ends if end is not None)))


PLAIN = AnswerFormat()


def answer_format(
    body: ChatRequest, prompt: str, syntax: Syntax[ReasoningFormat] | None, tools: ToolUse | None
) -> AnswerFormat:
    """The format of a chat's answer. `prompt` is the rendered chat."""
    if syntax is None:
        return AnswerFormat(tools=tools)
    reply = body.messages[-1].text if body.continue_final_message else None
    is_open = syntax.format.state_after(prompt, reply=reply)
    if is_open is False:
        return AnswerFormat(tools=tools)
    return AnswerFormat(Reasoning(syntax, is_open, body.separate_reasoning, body.stream_reasoning), tools)
