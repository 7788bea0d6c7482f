"""The OpenAPI document, generated from the types that parse requests and encode responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import msgspec
from pydantic.json_schema import models_json_schema

from eagle_server.api import inspection
from eagle_server.api.endpoints import render, tokens
from eagle_server.api.endpoints.chat import ChatBody, ChunkBody
from eagle_server.api.endpoints.completions import CompletionBody
from eagle_server.api.endpoints.messages import MessageBody, MessageEvent
from eagle_server.api.endpoints.response_objects import ResponseBody, ResponseEvent
from eagle_server.api.errors import AnthropicErrorBody, ErrorBody
from eagle_server.api.schemas.base import Body
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.schemas.messages import CountTokensRequest, MessagesRequest
from eagle_server.api.schemas.responses import ResponsesRequest
from eagle_server.api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from eagle_server.version import version

Schema = dict[str, Any]

REFERENCE = "#/components/schemas/"
ERRORS = {
    "400": "A parameter is wrong (`error.param` names it), or the parameters together allow no token.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The request's timeout is over, or its body came too slowly.",
    "413": "The body is too large.",
    "429": "Too many requests wait, or the API key's limit is reached; try again after `retry-after` seconds.",
    "500": "Generation failed.",
    "503": "There is no engine now: it is starting, or the server is shutting down.",
}
WITH_BODY = ("400", "401", "404", "408", "413", "503")
GENERATING = tuple(ERRORS)


@dataclass(frozen=True)
class Operation:
    """`answer` is the response's type. `events` has the types of a stream's events; none: it has no streams.

    `is_list`: the response is a list of `answer`. `last_data` is the data of a stream's last event where that is no
    JSON.
    """

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct]
    errors: tuple[str, ...] = ()
    body: type[Body] | None = None
    events: tuple[type[msgspec.Struct], ...] = ()
    parameters: tuple[Schema, ...] = ()
    error: type[msgspec.Struct] = ErrorBody
    last_data: str | None = None
    is_list: bool = False


MODEL_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "Continue a prompt",
        CompletionBody,
        GENERATING,
        CompletionRequest,
        (CompletionBody,),
        last_data="[DONE]",
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        ChatBody,
        GENERATING,
        ChatRequest,
        (ChunkBody,),
        last_data="[DONE]",
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer a conversation, in the shape of OpenAI's Responses API",
        ResponseBody,
        GENERATING,
        ResponsesRequest,
        get_args(ResponseEvent),
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, in the shape of Anthropic's Messages API",
        MessageBody,
        GENERATING,
        MessagesRequest,
        get_args(MessageEvent),
        error=AnthropicErrorBody,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation",
        tokens.CountedTokens,
        (*WITH_BODY, "429"),
        CountTokensRequest,
        error=AnthropicErrorBody,
    ),
    Operation(
        "post",
        "/v1/completions/render",
        "Prompts in tokens",
        render.Rendered,
        WITH_BODY,
        CompletionRequest,
        is_list=True,
    ),
    Operation(
        "post", "/v1/chat/completions/render", "A conversation in tokens", render.Rendered, WITH_BODY, ChatRequest
    ),
    Operation("post", "/tokenize", "Tokens of a text or of messages", tokens.Tokenized, WITH_BODY, TokenizeRequest),
    Operation("post", "/detokenize", "Text of tokens", tokens.Detokenized, WITH_BODY, DetokenizeRequest),
    Operation("get", "/tokenizer_info", "Vocabulary and chat template", tokens.TokenizerInfo, ("401", "503")),
    Operation("get", "/v1/models", "What is served", inspection.Models, ("401",)),
    Operation("get", "/v1/models/{name}", "One model", inspection.Model, ("401", "404"), parameters=(MODEL_NAME,)),
    Operation("get", "/v1/server_info", "Configuration and load", inspection.ServerInfo, ("401",)),
    Operation("get", "/server_info", "The same", inspection.ServerInfo, ("401",)),
    Operation("get", "/get_server_info", "The same", inspection.ServerInfo, ("401",)),
    Operation("get", "/model_info", "What routers ask about the model", inspection.ModelInfo, ("401",)),
    Operation("get", "/get_model_info", "The same", inspection.ModelInfo, ("401",)),
    Operation("get", "/get_load", "What routers ask about the load", inspection.WorkerLoad, ("401",), is_list=True),
    Operation("post", "/flush_cache", "Drop the prefix cache", inspection.CacheFlushed, ("400", "401", "503")),
    Operation("get", "/health", "Whether completions are served", inspection.Health, ("503",)),
    Operation("get", "/ping", "The same, for SageMaker", inspection.Health, ("503",)),
    Operation("get", "/health_generate", "Whether a token can be generated", inspection.Health, ("429", "503")),
    Operation("get", "/version", "The server's version", inspection.Version),
)


DESCRIPTION = (
    "Every parameter with its default, its limits and its errors is explained in the documentation's page *API*: "
    "`docs/api.md` in the sources. [The playground](./) shows what speculation does."
)
TAGS = {
    "generation": "Completions and conversations, in the shapes of OpenAI and Anthropic",
    "tokens": "Prompts and texts as tokens",
    "model and load": "What is served and how; most of it is asked by routers",
    "health": "Whether the server works",
}


def _tag(operation: Operation) -> str:
    if operation.errors is GENERATING:
        return "generation"
    if operation.answer in (inspection.Health, inspection.Version):
        return "health"
    return "model and load" if operation.answer.__module__ == inspection.__name__ else "tokens"


@cache
def openapi() -> Schema:
    """The document as a JSON-ready object."""
    paths: dict[str, dict[str, Schema]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "eagle_server", "version": version(), "description": DESCRIPTION},
        "tags": [{"name": name, "description": words} for name, words in TAGS.items()],
        "servers": [{"url": "./"}],  # relative to this document, which may lie below any path of a proxy
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def _operation(operation: Operation) -> Schema:
    answer = _reference(operation.answer)
    content: Schema = {
        "application/json": {"schema": {"type": "array", "items": answer} if operation.is_list else answer}
    }
    if operation.events:
        content["text/event-stream"] = {"schema": _event(operation)}
    responses: Schema = {"200": {"description": operation.summary, "content": content}}
    for status in operation.errors:
        error = {"application/json": {"schema": _reference(operation.error)}}
        responses[status] = {"description": ERRORS[status], "content": error}
    described: Schema = {"tags": [_tag(operation)], "summary": operation.summary, "responses": responses}
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        schema = {"application/json": {"schema": _reference(operation.body)}}
        described["requestBody"] = {"required": True, "content": schema}
    return described


def _event(operation: Operation) -> Schema:
    """The schema of one server-sent event; docs/api.md says in which order they come."""
    types = [_reference(struct) for struct in (*operation.events, operation.error)]
    data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": types}}
    if operation.last_data is not None:
        data = {"anyOf": [{"const": operation.last_data}, data]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _reference(model: type[Any]) -> Schema:
    return {"$ref": f"{REFERENCE}{model.__name__}"}


def _schemas() -> dict[str, Schema]:
    bodies = [(operation.body, "validation") for operation in OPERATIONS if operation.body is not None]
    _, definitions = models_json_schema(bodies, ref_template=f"{REFERENCE}{{model}}")  # type: ignore[arg-type]
    structs = [struct for operation in OPERATIONS for struct in (operation.answer, operation.error, *operation.events)]
    _, answers = msgspec.json.schema_components(structs, ref_template=f"{REFERENCE}{{name}}")
    taken: Mapping[str, Schema] = definitions["$defs"]
    asked = {name: _with_nulls(schema) for name, schema in taken.items()}
    return asked | {name: _without_raw(schema) for name, schema in answers.items()}


def _without_raw(schema: Any) -> Any:
    """Drop alternatives that allow anything. msgspec describes `msgspec.Raw` in `Encoded` parts so."""
    if isinstance(schema, list):
        return [_without_raw(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: _without_raw(value) for name, value in schema.items()}
    if {} not in parts.get("anyOf", ()):
        return parts
    types = [alternative for alternative in parts["anyOf"] if alternative]
    return {**parts, "anyOf": types} if len(types) > 1 else types[0]


def _with_nulls(schema: Schema) -> Schema:
    """Allow null for every optional parameter of a body's object."""
    required = schema.get("required", ())
    properties = {
        name: value if name in required else {"anyOf": [value, {"type": "null"}]}
        for name, value in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties} if properties else schema
