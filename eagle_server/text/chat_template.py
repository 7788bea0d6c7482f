"""Conversations as the text that a model was trained on: Jinja templates, rendered in a sandbox.

The environment is that of transformers' apply_chat_template (same filters, functions and whitespace rules), which
cannot be used itself: importing transformers takes seconds and brings torch into the API process.
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

# What a template is always given; callers may not replace it.
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
VARIABLES = "chat_template_kwargs"
END_OF_CONTENT = "\ue000the final message ends here\ue000"  # private-use characters: not in anybody's text


class TemplateError(ValueError):
    """The template does not take these messages, tools or variables, as `param` says; the message is one line."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(" ".join(message.split())[:500])
        self.param = param


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, *args: Any, **options: Any) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and keys in the order in which they came."""
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
class _Compiled:
    """A template, and the variables it reads."""

    source: str
    render: Callable[..., str]
    variables: frozenset[str]

    @classmethod
    def of(cls, source: str) -> _Compiled:
        environment = _environment()
        try:
            variables = find_undeclared_variables(environment.parse(source)) - FUNCTIONS
            return cls(source, environment.from_string(source).render, frozenset(variables))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is broken: {_one_line(error)}") from error


@dataclass(frozen=True)
class Ending:
    """What ends a reply beside the model's own end-of-sequence tokens: texts and tokens of templates we chose."""

    stops: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Turn:
    """What is to be rendered. The last message may be one to go on with."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """A model's template. `special_tokens` are variables like bos_token.

    `tool_source` is used for turns with tools, where a model has a template of its own for them. `adds_special`: the
    text has no special tokens itself, so the tokenizer adds those it puts around any prompt.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
        ending: Ending | None = None,
        adds_special: bool = False,
    ) -> None:
        """
        Raises:
            ValueError: the template is broken; the message is one line.
        """
        self._plain = _Compiled.of(source)
        self._tools = self._plain if tool_source is None else _Compiled.of(tool_source)
        self.special_tokens = dict(special_tokens or {})
        self.ending = ending or Ending()
        self.adds_special = adds_special

    @property
    def source(self) -> str:
        return self._plain.source

    @property
    def tool_source(self) -> str:
        """The template of turns with tools."""
        return self._tools.source

    def render(self, turn: Turn) -> str:
        """The prompt of a turn.

        Raises:
            TemplateError: the template refuses the turn, has no place for a part of it, or fails.
        """
        template = self._tools if turn.tools else self._plain
        self._check(template, turn)
        messages = self._messages(template, turn)
        try:
            text = template.render(
                **{**self.special_tokens, **turn.variables},
                messages=messages,
                tools=list(turn.tools) or None,
                documents=None,
                add_generation_prompt=turn.add_generation_prompt,
            )
        except TemplateError:
            raise
        except Exception as error:  # whatever a template does with values of the wrong kind
            raise TemplateError(f"the model's chat template failed: {_one_line(error)}") from error
        if not turn.continue_final_message:
            return text
        if END_OF_CONTENT not in text:
            raise TemplateError("the model's chat template leaves the final message out: it cannot be continued")
        return text[: text.rindex(END_OF_CONTENT)]

    def _check(self, template: _Compiled, turn: Turn) -> None:
        if turn.tools and "tools" not in template.variables:
            raise TemplateError("this model's chat template has no place for tools", "tools")
        for name in turn.variables:
            if name in GIVEN or name in self.special_tokens:
                raise TemplateError(f"{VARIABLES} may not replace {name}", VARIABLES)
            if name not in template.variables:
                raise TemplateError(f"this model's chat template has no variable {name}", VARIABLES)

    def _messages(self, template: _Compiled, turn: Turn) -> list[dict[str, Any]]:
        messages = [dict(message) for message in turn.messages]
        if "developer" not in template.source:  # OpenAI's newer name of the system's role
            for message in messages:
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        if turn.continue_final_message:
            messages[-1]["content"] += END_OF_CONTENT
        return messages


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
