"""Renders a conversation with the model's chat template, a Jinja template, in a sandbox.

The environment has the filters, functions and whitespace rules of transformers' apply_chat_template. transformers
itself is not used: importing it takes seconds and loads torch into the API process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagle_server.text.message_forms import Written, forms, says_all

# Variables that every template gets. Requests may not replace them.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
VARIABLES = "chat_template_kwargs"
PROBE = "a text that a template should print"
END_OF_CONTENT = "\ue000the final message ends here\ue000"  # private-use characters, which no real message has


class TemplateError(ValueError):
    """The template does not accept the parameter `param`. The message is one line."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(" ".join(message.split())[:500])
        self.param = param


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's tokens for training. Rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, *args: Any, **options: Any) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and keys keep their order."""
    if isinstance(value, Written):
        return str(value)
    return json.dumps(value, *args, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@dataclass(frozen=True)
class _CompiledTemplate:
    """A template and the names of the variables that it reads."""

    source: str
    render: Callable[..., str]
    variables: frozenset[str]
    takes_parts: bool  # a message's content is a list of parts, as templates of models that see images have it

    @classmethod
    def of(cls, source: str) -> _CompiledTemplate:
        environment = _environment()
        try:
            variables = find_undeclared_variables(environment.parse(source)) - FUNCTIONS
            render = environment.from_string(source).render
            return cls(source, render, frozenset(variables), _takes_parts(render))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is broken: {_one_line(error)}") from error


def _takes_parts(render: Callable[..., str]) -> bool:
    """Whether the template leaves out a text, but says it as a part."""

    def says(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            return PROBE in render(messages=messages, tools=None, documents=None, add_generation_prompt=True)
        except Exception:  # a template may need what a conversation alone has
            return False

    return not says(PROBE) and says(_parts(PROBE))


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@dataclass(frozen=True)
class TemplateStops:
    """What ends a reply in the format of a default template, in addition to the model's end-of-sequence tokens."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


NO_STOPS = TemplateStops()


@dataclass(frozen=True)
class Conversation:
    """The input of a template. `continue_final_message`: the reply continues the last message.

    `hints` are variables that a template may ignore.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """A model's template. `special_tokens` are variables like bos_token.

    `tool_source` is a second template for conversations with tools, which some models have. `adds_special`: the
    rendered text has no special tokens, so the tokenizer must add its own, as to a plain prompt. `built_in`: the name
    of a default template, for a model that has none.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
        stops: TemplateStops = NO_STOPS,
        adds_special: bool = False,
        built_in: str | None = None,
    ) -> None:
        """
        Raises:
            ValueError: the template is broken; the message is one line.
        """
        self._plain = _CompiledTemplate.of(source)
        self._tools = self._plain if tool_source is None else _CompiledTemplate.of(tool_source)
        self.special_tokens = dict(special_tokens or {})
        self.stops = stops
        self.adds_special = adds_special
        self.built_in = built_in

    @property
    def source(self) -> str:
        return self._plain.source

    @property
    def tool_source(self) -> str:
        """The template of conversations with tools."""
        return self._tools.source

    def render(self, conversation: Conversation) -> str:
        """The prompt of a conversation.

        Raises:
            TemplateError: the template rejects the conversation, ignores a part of it, or fails.
        """
        template = self._tools if conversation.tools else self._plain
        self._check(template, conversation)
        refusal: TemplateError | None = None
        rendered: str | None = None  # by the first form that the template takes
        for messages in forms(conversation.messages):
            try:
                text = self._render(template, conversation, messages)
            except TemplateError as error:
                refusal = refusal or error
                continue
            if says_all(text, messages):
                return text
            rendered = text if rendered is None else rendered
        if rendered is None:
            assert refusal is not None
            raise refusal
        return rendered

    def _render(
        self, template: _CompiledTemplate, conversation: Conversation, messages: Sequence[Mapping[str, Any]]
    ) -> str:
        try:
            text = template.render(
                **{**self.special_tokens, **conversation.hints, **conversation.variables},
                messages=self._messages(template, conversation, messages),
                tools=list(conversation.tools) or None,
                documents=None,
                add_generation_prompt=conversation.add_generation_prompt,
            )
        except TemplateError:
            raise
        except Exception as error:  # a template may do anything with values of an unexpected type
            raise TemplateError(f"the model's chat template failed: {_one_line(error)}") from error
        if not conversation.continue_final_message:
            return text
        if END_OF_CONTENT not in text:
            raise TemplateError("the model's chat template leaves the final message out: it cannot be continued")
        return text[: text.rindex(END_OF_CONTENT)]

    def _check(self, template: _CompiledTemplate, conversation: Conversation) -> None:
        if conversation.tools and "tools" not in template.variables:
            reason = "this model's chat template has no place for tools; --chat-template FILE gives it another"
            raise TemplateError(reason, "tools")
        for name in conversation.variables:
            if name in RESERVED or name in self.special_tokens:
                raise TemplateError(f"{VARIABLES} may not replace {name}", VARIABLES)
            if name not in template.variables:
                raise TemplateError(f"this model's chat template has no variable {name}", VARIABLES)

    def _messages(
        self, template: _CompiledTemplate, conversation: Conversation, given: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        messages = [dict(message) for message in given]
        if "developer" not in template.source:  # OpenAI's newer name for the system role
            for message in messages:
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        if ".thinking" in template.source:  # gpt-oss's name; with a call it takes either thinking or content
            for message in messages:
                if "reasoning_content" in message and not ("tool_calls" in message and message["content"]):
                    message["thinking"] = message["reasoning_content"]
        if conversation.continue_final_message:
            messages[-1]["content"] += END_OF_CONTENT
        if template.takes_parts:
            for message in messages:
                message["content"] = _parts(message["content"])
        return messages


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
