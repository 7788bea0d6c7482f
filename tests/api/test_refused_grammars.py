"""An error of a grammar names the parameter that it is from, and the reason in the words of its schema."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from eagle_server.engine.grammars.grammars import Grammars
from eagle_server.request import FinishReason, GrammarError, Request
from tests.api.conftest import Templated
from tests.api.fake_engine import FakeEngine
from tests.support.grammars import VOCAB, json_tokenizer

TEXT = {"prompt": "a"}
SAID = {"messages": [{"role": "user", "content": "a"}]}
NOT = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
HUGE = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 10**18}}, "required": ["a"]}
FINE = {"type": "object", "properties": {"a": {"type": "string", "format": "password"}}}
KEYWORD = "cannot be followed: the JSON schema has keywords that cannot be enforced: #/properties/a/not"
RANGE = "cannot be followed: the range of an integer cannot be enforced: minimum 1000000000000000000"


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def text_format(schema: Any) -> dict[str, Any]:
    return {"input": "a", "text": {"format": {"type": "json_schema", "name": "f", "schema": schema}}}


def output_config(schema: Any) -> dict[str, Any]:
    return {**SAID, "max_tokens": 8, "output_config": {"format": {"type": "json_schema", "schema": schema}}}


TOOLS = {"tools": [tool("f", FINE), tool("g", FINE), tool("h", HUGE)]}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "h"}}}
RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": NOT}
MESSAGES_TOOL = {"name": "f", "input_schema": NOT}
ANY = {"tool_choice": {"type": "any"}}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat/completions", {**SAID, **response_format(NOT)}, "response_format.json_schema.schema", KEYWORD),
    ("chat/completions", {**SAID, **response_format(HUGE)}, "response_format.json_schema.schema", RANGE),
    (
        "chat/completions",
        {**SAID, **response_format({"$ref": "#/$defs/x"})},
        "response_format.json_schema.schema",
        "cannot be followed: $ref to what the schema does not have: #/$defs/x",
    ),
    ("completions", {**TEXT, **response_format(NOT), "stream": True}, "response_format.json_schema.schema", KEYWORD),
    ("completions", {**TEXT, "structured_outputs": {"json": NOT}}, "structured_outputs.json", KEYWORD),
    ("completions", {**TEXT, "structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ("completions", {**TEXT, "structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "x"),
    ("chat/completions", {**SAID, **TOOLS, "tool_choice": "required"}, "tools.2.function.parameters", RANGE),
    ("chat/completions", {**SAID, **TOOLS, **NAMED}, "tools.2.function.parameters", RANGE),
    ("responses", text_format(NOT), "text.format.schema", KEYWORD),
    ("responses", {"input": "a", "tools": [RESPONSES_TOOL], "tool_choice": "required"}, "tools.0.parameters", KEYWORD),
    ("messages", output_config(NOT), "output_config.format.schema", KEYWORD),
    ("messages", {**SAID, "max_tokens": 8, "tools": [MESSAGES_TOOL], **ANY}, "tools.0.input_schema", KEYWORD),
]  # fmt: skip


class CompilingEngine(FakeEngine):
    """It refuses a grammar as the engine does."""

    grammars = Grammars(json_tokenizer, VOCAB, [0])

    def add(self, request: Request) -> None:
        grammar = request.sampling.grammar
        error = None if grammar is None else self.grammars.compile(grammar).exception()
        if error is None:
            super().add(request)
        else:
            assert isinstance(error, GrammarError)
            self._end(request.request_id, FinishReason.REFUSED, error=str(error), param=error.param)


@pytest.fixture
def engine() -> FakeEngine:
    return CompilingEngine()


@pytest.fixture
async def http(templated: Templated) -> AsyncIterator[httpx.AsyncClient]:
    template = "{% if tools %}{% endif %}{{ messages[-1].content }}"
    async with templated(template, "--tool-call-parser", "hermes") as client:
        yield client


@pytest.mark.parametrize(("path", "body", "param", "words"), CASES)
async def test_an_error_names_the_parameter(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(f"{param} cannot be followed: ")
    assert words in error["message"]
    assert "lark" not in error["message"]
    if path != "messages":  # Anthropic's errors have no param
        assert (error["param"], error["code"]) == (param, "invalid_value")


async def test_a_format_that_is_not_enforced_is_served(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={**SAID, **response_format(FINE)})
    assert answer.status_code == 200, answer.text
