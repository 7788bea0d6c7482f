"""Random bodies of the generating endpoints, drawn from the models that parse them: a new parameter is drawn as well.

Most bodies are valid. Values of parameters that need a meaning (grammars, tools, lengths) come from MEANT.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from eagle_server.api.errors import ApiError
from eagle_server.api.schemas.base import Body, parse
from eagle_server.api.schemas.chat import ChatRequest, Message
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.schemas.grammar import StructuredOutputs
from eagle_server.api.schemas.messages import AnthropicMessage, InputTool, MessagesRequest
from eagle_server.api.schemas.responses import Item, ResponsesRequest

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")  # of output tokens
BOUNDS = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt)
VOCABULARY = 4096  # the demo's
WORK = 64  # most tokens of all choices of a body together, so that an example takes a second, not a minute
WORDS = st.text(max_size=12) | st.sampled_from(
    ["def f(x):\n", "return", " self", "é", "\u4f60\u597d", "🙂", "\0", "\n\n"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
# Wrong in most places. NaN and infinity are not JSON, but Python's clients can send them.
EXTREMES = JSON | st.sampled_from(
    [
        float("nan"),
        float("inf"),
        -1,
        0,
        2**31,
        -(2**63),
        2**64,
        10**400,
        1e308,
        -0.0,
        "",
        "x" * 5000,
        [],
        {},
        [[]],
        "\ud800",
    ]
)

TOKENS = st.integers(0, VOCABULARY - 1)
REGEXES = st.sampled_from(
    [r"[a-z]{1,8}", r"\d+(\.\d+)?", r"(yes|no)( (yes|no))*", "", ".*", r"\w+\s?", "é+", "(", "a{3,1}"]
)
EBNF = st.sampled_from(
    [
        'root ::= "a" | "b" root',
        "root ::= [0-9]+ rest\nrest ::= [a-z]*",
        'root ::= ""',
        "root ::= root",
        'root ::= root "a"',
        'root ::= item ("," item)*\nitem ::= [a-z]+ | "é"',
        "root ::= missing",
        "nonsense",
    ]
)
SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {},
            True,
            False,
            {"type": "string", "maxLength": 5},
            {"type": "integer", "minimum": -3, "maximum": 10**12},
            {"type": "number"},
            {"type": "null"},
            {"type": ["boolean", "string"]},
            {"enum": ["a", 1, None, "é"]},
            {"const": {"a": [1]}},
            {"pattern": "^[a-c]{2}$", "type": "string"},
            {"type": "string", "format": "date"},
            {"type": "no such type"},
            {"$ref": "#"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda each: {"type": "array", "items": each, "maxItems": 3}, inner),
        st.builds(lambda each: {"anyOf": [each, {"type": "null"}]}, inner),
        st.builds(
            lambda each, needed: {"type": "object", "properties": each, "required": [*each][:needed]},
            st.dictionaries(st.sampled_from(["a", "b", "é"]), inner, max_size=3),
            st.integers(0, 3),
        ),
    ),
    max_leaves=4,
)
SCHEMA_OBJECTS = SCHEMAS.filter(lambda schema: isinstance(schema, dict))
TOOL = st.builds(
    lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
    st.sampled_from(["f", "get_weather"]),
    SCHEMA_OBJECTS,
)


def messages() -> SearchStrategy[dict[str, Any]]:
    """Mostly messages that the model accepts."""
    plain = st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": WORDS}
    )
    return plain | part(Message).filter(_is_message)


def _is_message(values: dict[str, Any]) -> bool:
    try:
        Message.model_validate(values)
    except ValidationError:
        return False
    return True


# By name of the parameter.
MEANT: dict[str, SearchStrategy[Any]] = {
    "prompt": st.one_of(
        st.just("def f(x):\n"),
        WORDS,
        st.lists(TOKENS, max_size=40),
        st.lists(WORDS, max_size=3),
        st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=1, max_size=3),
        st.just("x = 1\n" * 60),
    ),
    "arguments": st.sampled_from(["", "{}", '{"a": 1}', "[]", "{"]),
    "model": st.just("demo"),
    "n": st.integers(1, 4) | st.sampled_from([17, 128]),
    "best_of": st.just(1),
    "max_tokens": st.integers(0, 24) | st.just(WORK),
    "max_completion_tokens": st.integers(1, 24),
    "max_output_tokens": st.integers(1, 24),
    "metadata": st.dictionaries(WORDS, WORDS, max_size=2),
    "min_tokens": st.integers(0, 12),
    "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=20) | st.just([*range(300)]),
    "stop_token_ids": st.lists(TOKENS, max_size=20),
    "logit_bias": st.dictionaries(TOKENS.map(str), st.floats(-100, 100), max_size=20),
    "bad_words": st.lists(WORDS.filter(bool), max_size=20),
    "timeout": st.floats(0.01, 60),
    "tools": st.lists(TOOL, max_size=2),
    "messages": st.lists(st.deferred(messages), min_size=1, max_size=4),
    "chat_template_kwargs": st.just({}) | st.dictionaries(st.sampled_from(["enable_thinking"]), JSON, max_size=1),
    "regex": REGEXES,
    "grammar": EBNF,
    "json": SCHEMAS | SCHEMAS.map(json.dumps),
    "schema": SCHEMAS,
}


def of_the_model(model: type[BaseModel]) -> dict[str, SearchStrategy[Any]]:
    """Parameters whose names mean something else in other bodies."""
    if model is ResponsesRequest:
        tools = TOOL.map(lambda tool: {"type": "function", **tool["function"]})
        return {
            "input": WORDS | st.lists(values_of(Item), min_size=1, max_size=4),
            "tools": st.lists(tools, max_size=2),
        }
    if model is MessagesRequest:
        plain = st.fixed_dictionaries({"role": st.just("user"), "content": WORDS})
        messages = st.lists(plain | part(AnthropicMessage), min_size=1, max_size=4)
        return {"messages": messages, "tools": st.lists(part(InputTool), max_size=2)}
    return {}


def values_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> SearchStrategy[Any]:
    """Values of a type of the models, within its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(arguments[0], (*_flat(arguments[1:]), *metadata))
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(each, metadata) for each in arguments])
    least = next((each.min_length for each in metadata if isinstance(each, annotated_types.MinLen)), 0)
    bounds = [each for each in metadata if isinstance(each, BOUNDS)]
    made = {
        Literal: lambda: st.sampled_from(arguments),
        list: lambda: st.lists(values_of(arguments[0]), min_size=least, max_size=least + 3),
        dict: lambda: st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3),
        Any: lambda: JSON,
        str: lambda: WORDS.filter(lambda text: len(text) >= least),
        int: lambda: st.from_type(Annotated[int, *bounds] if bounds else int),
        float: lambda: st.from_type(Annotated[float, *bounds]),
        bool: st.booleans,
        type(None): st.none,
    }
    kind = origin or annotation
    return made[kind]() if kind in made else part(kind)


def _flat(metadata: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each for one in metadata for each in (one.metadata if isinstance(one, FieldInfo) else (one,)))


@cache
def parameters(model: type[BaseModel]) -> dict[str, SearchStrategy[Any]]:
    """A strategy for each parameter of a model, by its name in JSON. For a body also those that are only tolerated."""
    drawn: dict[str, SearchStrategy[Any]] = {}
    meant = {**MEANT, **of_the_model(model)}
    for name, field in model.model_fields.items():
        key = field.alias or name
        drawn[key] = meant[key] if key in meant else values_of(field.annotation, tuple(field.metadata))
    neutral = getattr(model, "neutral", {})
    return drawn | {name: st.sampled_from(allowed) for name, allowed in neutral.items() if allowed}


def required(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items() if field.is_required()}


@st.composite
def part(draw: st.DrawFn, model: type[BaseModel]) -> dict[str, Any]:
    """An object in a body: the required parameters and a few others; of structured outputs exactly one."""
    given = parameters(model)
    names = required(model) or ({draw(st.sampled_from(sorted(given)))} if model is StructuredOutputs else set())
    chosen = {
        *names,
        *(() if model is StructuredOutputs else draw(st.sets(st.sampled_from(sorted(given)), max_size=3))),
    }
    return {name: draw(given[name]) for name in sorted(chosen)}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A body for an endpoint. One in five has a parameter with an extreme or wrong value."""
    model = BODIES[path]
    given = parameters(model)
    limit = next(name for name in ("max_tokens", *LIMITS) if name in given)
    chosen = {*required(model), limit, *draw(st.sets(st.sampled_from(sorted(given)), min_size=4, max_size=14))}
    body = {name: draw(given[name]) for name in sorted(chosen)}
    _limit_work(body)
    body = _valid(model, body)
    if limit not in body:
        body["timeout"] = 1.0
    if draw(st.integers(0, 4)) == 0:
        body[draw(st.sampled_from(sorted({*given, "no_such_parameter"})))] = draw(EXTREMES)
    return body


def _valid(model: type[Body], body: dict[str, Any]) -> dict[str, Any]:
    """Drop the parameters that the model refuses, which many do only beside others."""
    while True:
        try:
            parse(model, encoded(body))
        except ApiError as error:
            name = (error.param or "").partition(".")[0]
            if name in required(model) or name not in body:
                return body
            del body[name]
        else:
            return body


def _limit_work(body: dict[str, Any]) -> None:
    prompts = body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    if "max_tokens" in body:
        body["max_tokens"] = min(body["max_tokens"], max(WORK // (count * body.get("n", 1)), 1))


def encoded(body: Mapping[str, Any]) -> bytes:
    """JSON in ASCII, with NaN where the body has it."""
    return json.dumps(body).encode()
