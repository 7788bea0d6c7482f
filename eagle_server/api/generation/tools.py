"""Tool calls of a request: how they are recognized, and the grammar that enforces them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_server.api.errors import ApiError, bad_request
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.request import Grammar
from eagle_server.text.markers import Syntax
from eagle_server.text.tool_formats import ToolFormat
from eagle_server.text.tool_grammars import argument_schema, call_grammar
from eagle_server.text.tool_json import Functions
from eagle_server.text.tool_parser import ToolCallParser


@dataclass(frozen=True)
class ToolUse:
    """A request's use of tools. `single`: at most one call. `grammar` is not None if the answer must be a call."""

    syntax: Syntax[ToolFormat]
    functions: Functions
    single: bool
    grammar: Grammar | None

    def parser(self) -> ToolCallParser:
        """A new parser, for one choice."""
        return ToolCallParser(self.syntax.format, self.functions, single=self.single)


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
    grammar = _grammar(body, syntax, functions, single=single) if body.must_call else None
    return ToolUse(syntax, schemas, single, grammar)


def _grammar(
    body: ChatRequest, syntax: Syntax[ToolFormat], functions: list[dict[str, Any]], *, single: bool
) -> Grammar:
    callable_functions = []
    for number, function in enumerate(functions):
        if body.named_function in (None, function["name"]):
            try:
                callable_functions.append((function["name"], argument_schema(function.get("parameters"))))
            except ValueError as error:
                param = f"tools.{number}.{body.name('function.parameters')}"
                raise bad_request(f"{param} {error}", param, "invalid_value") from None
    try:
        return call_grammar(syntax.format, callable_functions, syntax.tokens, single=single)
    except ValueError as error:
        raise bad_request(f"the parameters of a tool: {error}", "tools", "invalid_value") from None


def _no_parser(param: str) -> ApiError:
    message = (
        f"{param}: calls are not recognized for this model; start the server with the --tool-call-parser that fits it"
    )
    return bad_request(message, param, "invalid_value")
