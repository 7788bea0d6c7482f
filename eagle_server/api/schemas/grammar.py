"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from eagle_server.api.schemas.base import Part
from eagle_server.request import MAX_GRAMMAR_CHARACTERS, Grammar

MAX_TEXTS = 1024

Source = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


def finite(schema: Any) -> Any:
    """Refuse infinity, which JSON does not have. Python reads 1e999 as infinity."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, float) and not math.isfinite(part):
            raise PydanticCustomError("finite", "a number in the schema is too large")
        if isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
    return schema


Schema = Annotated[dict[str, Any] | bool, AfterValidator(finite)]


def _source_or_schema(value: Any) -> Any:
    """Check a text here: pydantic would report a text that is too long as "not an object"."""
    if isinstance(value, str):
        if not 1 <= len(value) <= MAX_GRAMMAR_CHARACTERS:
            message = "should have from 1 to {most} characters where it is text"
            raise PydanticCustomError("length", message, {"most": MAX_GRAMMAR_CHARACTERS})
        return _parsed(value)
    if not isinstance(value, dict | bool | None):
        raise PydanticCustomError("json", "should be a JSON schema, as an object or as its text")
    return value


class JsonSchema(Part):
    """The output always follows the schema, so `name`, `description` and `strict` have no effect."""

    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """OpenAI's response format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_due(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError("schema", "json_schema belongs to type json_schema, and to no other")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Grammar(kind="json_object")
        return Grammar(kind="json_schema", source=_text(self.json_schema.schema_))


class StructuredOutputs(Part):
    """vLLM's; exactly one field is given. `json` is a schema, as an object or as text. `grammar` is EBNF."""

    json_: Annotated[Schema | None, BeforeValidator(_source_or_schema, json_schema_input_type=Schema | Source)] = Field(
        None, alias="json"
    )
    json_object: Literal[True] | None = None
    regex: Source | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_TEXTS)] | None = (
        None
    )
    grammar_: Source | None = Field(None, alias="grammar")

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        values = (self.json_, self.json_object, self.regex, self.choice, self.grammar_)
        if sum(value is not None for value in values) != 1:
            raise PydanticCustomError("count", "should have exactly one of json, json_object, regex, choice, grammar")
        return self

    @property
    def field(self) -> str:
        """The name of the field that is given."""
        names = ("json", "json_object", "regex", "choice", "grammar")
        values = (self.json_, self.json_object, self.regex, self.choice, self.grammar_)
        return next(name for name, value in zip(names, values, strict=True) if value is not None)

    @property
    def grammar(self) -> Grammar:
        if self.json_ is not None:
            return Grammar(kind="json_schema", source=_text(self.json_))
        if self.regex is not None:
            return Grammar(kind="regex", source=self.regex)
        if self.choice is not None:
            return Grammar(kind="choice", source=json.dumps(self.choice, ensure_ascii=False))
        if self.grammar_ is not None:
            return Grammar(kind="ebnf", source=self.grammar_)
        return Grammar(kind="json_object")


def _parsed(text: str) -> Schema:
    try:
        # Unlike `json`, it refuses half a surrogate pair, which no message to the engine can have.
        schema = from_json(text, allow_inf_nan=False)
    except ValueError:
        raise PydanticCustomError("json", "should be a JSON schema, as an object or as its text") from None
    if not isinstance(schema, dict | bool):
        raise PydanticCustomError("json", "should be a JSON schema, as an object or as its text")
    return schema


def _text(schema: Schema) -> str:
    return json.dumps(schema, ensure_ascii=False)
