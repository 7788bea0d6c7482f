"""How a chat's output is parsed: thinking, then content and tool calls; and the grammar that enforces its form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from eagle_server.api.errors import ApiError, bad_request
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.request import MAX_GRAMMAR_CHARACTERS, Grammar
from eagle_server.text.chat_template import TemplateStops
from eagle_server.text.markers import Syntax
from eagle_server.text.reasoning_formats import ReasoningFormat
from eagle_server.text.reasoning_parser import ChannelParser, ReasoningParser
from eagle_server.text.tokenizer import Tokenizer
from eagle_server.text.tools.formats import ToolFormat
from eagle_server.text.tools.grammars import argument_schema, call_grammar, can_write
from eagle_server.text.tools.json_calls import Functions
from eagle_server.text.tools.parser import ToolCallParser


@dataclass(frozen=True)
class Reasoning:
    """The thinking of one request, see `ReasoningParser`."""

    syntax: Syntax[ReasoningFormat]
    is_open: bool | None
    separate: bool
    stream: bool


@dataclass(frozen=True)
class ToolUse:
    """A request's use of tools. `single`: at most one call.

    `grammar` is not None if the answer must be a call, or calls or a text of a certain form.
    """

    syntax: Syntax[ToolFormat]
    functions: Functions
    single: bool
    grammar: Grammar | None = None

    def parser(self) -> ToolCallParser:
        """A new parser, for one choice."""
        instead = self.grammar is not None and self.grammar.kind != "calls"
        return ToolCallParser(self.syntax.format, self.functions, single=self.single, instead=instead)


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
        """The grammar of the whole output: of the thinking, then of the tools, else the `requested` one."""
        grammar = (self.tools and self.tools.grammar) or requested
        if grammar is None or self.reasoning is None:
            return grammar
        syntax = self.reasoning.syntax
        thinking = syntax.format.lark(syntax.tokens, is_open=self.reasoning.is_open)
        return replace(grammar, thinking=thinking)

    def stops(self, template: TemplateStops, tokenizer: Tokenizer) -> TemplateStops:
        """The template's stops, and the end tokens of this format."""
        ends = () if self.reasoning is None else map(tokenizer.token_id, self.reasoning.syntax.format.ends)
        return dataclasses.replace(template, token_ids=(*template.token_ids, *(end for end in ends if end is not None)))


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


def tool_use(body: ChatRequest, syntax: Syntax[ToolFormat] | None) -> ToolUse | None:
    """None if the response is not parsed for tool calls.

    Raises:
        ApiError: the request wants calls enforced, and this is not possible.
    """
    if not body.offered_tools:
        return None
    if syntax is None:
        if body.must_call or not body.parallel_tool_calls:
            raise _no_parser(body.name("tool_choice" if body.must_call else "parallel_tool_calls"))
        return None
    functions = [tool["function"] for tool in body.offered_tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    single = body.named_function is not None or not body.parallel_tool_calls or syntax.format.single
    form = None if body.must_call else body.grammar
    if form is None and not body.must_call:
        return ToolUse(syntax, schemas, single)
    callable_functions = {
        f"tools.{number}.{body.name('function.parameters')}": function
        for number, function in enumerate(functions)
        if body.named_function in (None, function["name"])
        and (body.must_call or can_write(syntax.format, function["name"]))
    }
    if form is not None and not callable_functions:
        return ToolUse(syntax, schemas, single, form)
    grammar = _grammar(syntax, callable_functions, single=single, strict=body.must_call)
    if form is not None:
        grammar = replace(form, calls=grammar.source, call_params=grammar.call_params)
    return ToolUse(syntax, schemas, single, grammar)


def _grammar(
    syntax: Syntax[ToolFormat], functions: Mapping[str, Mapping[str, Any]], *, single: bool, strict: bool
) -> Grammar:
    """The grammar of calls of these functions, which are by the parameter that names their schema.

    Without `strict` only functions that are strict themselves have their schemas enforced.

    Raises:
        ApiError: a schema cannot be enforced, or the grammar is too long.
    """
    schemas = dict[str, tuple[str, Mapping[str, Any] | None]]()
    for param, function in functions.items():
        try:
            enforced = strict or function.get("strict")
            schema = argument_schema(function.get("parameters")) if enforced else None
            schemas[param] = (function["name"], schema)
        except ValueError as error:
            raise bad_request(f"{param} {error}", param, "invalid_value") from None
    try:
        grammar = call_grammar(syntax.format, list(schemas.values()), syntax.tokens, single=single)
        return replace(grammar, param="tools", call_params=tuple(schemas))
    except ValueError as error:
        size = 0
        for param, one in schemas.items():
            try:
                size += len(call_grammar(syntax.format, [one], syntax.tokens, single=single).source)
            except ValueError as reason:
                raise bad_request(f"{param}: {reason}", param, "invalid_value") from None
            if size > MAX_GRAMMAR_CHARACTERS:
                break
        raise bad_request(f"the parameters of the tools: {error}", "tools", "invalid_value") from None


def _no_parser(param: str) -> ApiError:
    message = (
        f"{param}: calls are not recognized for this model; start the server with the --tool-call-parser that fits it"
    )
    return bad_request(message, param, "invalid_value")
