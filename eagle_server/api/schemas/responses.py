"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from eagle_server.api.schemas.base import Copied, Part, each_checked, known, typed
from eagle_server.api.schemas.chat import Function, FunctionCall, Message, ReasoningEffort, ToolCallParam, Values
from eagle_server.api.schemas.generation import EXPECTED_STOPS, FAIL_FAST, NonEmpty, SamplingBody, Stops
from eagle_server.api.schemas.grammar import JsonSchema
from eagle_server.api.schemas.translated import TranslatedBody, with_system

MAX_METADATA = 16
Status = Literal["in_progress", "completed", "incomplete"]


class TextContent(Copied):
    """A text part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


Content = Annotated[
    list[TextContent],
    FAIL_FAST,
    typed(
        "input_text",
        "output_text",
        "text",
        of_text=lambda text: {"type": "input_text", "text": text},
        schema=str | list[TextContent],
    ),
]


def _text(content: Iterable[TextContent]) -> str:
    """Parts are joined by line breaks, as in chats."""
    return "\n".join(part.text for part in content)


class MessageItemParam(Copied):
    """A message. `phase` has no effect."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Any = None
    status: Any = None
    phase: Any = None


class FunctionCallParam(FunctionCall):
    """A function call of an earlier response."""

    type: Literal["function_call"]
    call_id: NonEmpty
    namespace: NonEmpty | None = None
    id: Any = None
    status: Any = None


class FunctionCallOutput(Copied):
    """What the called function returned."""

    type: Literal["function_call_output"]
    call_id: NonEmpty
    output: Content
    id: Any = None
    status: Any = None


class ReasoningContent(Copied):
    type: Literal["reasoning_text"]
    text: str


class ReasoningParam(Copied):
    """Thinking of an earlier response. Summaries and encrypted thinking are dropped."""

    type: Literal["reasoning"]
    id: Any = None
    summary: Any = None
    content: Annotated[list[ReasoningContent], FAIL_FAST, typed("reasoning_text")] = Field(default_factory=list)
    encrypted_content: Any = None
    status: Any = None


Item = Annotated[
    MessageItemParam | FunctionCallParam | FunctionCallOutput | ReasoningParam, Field(discriminator="type")
]


Input = Annotated[
    list[Item],
    FAIL_FAST,
    typed(
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        default="message",
        of_text=lambda text: {"role": "user", "content": text},
        schema=str | list[Item],
    ),
]


class FunctionTool(Function):
    type: Literal["function"]


class NamespaceTool(Copied):
    """Several functions. The model sees each with the namespace before its name."""

    type: Literal["namespace"]
    name: NonEmpty
    description: str | None = None
    tools: Annotated[list[Values], FAIL_FAST, typed("function")]

    @field_validator("tools")
    @classmethod
    def _are_function_tools(cls, tools: list[Values]) -> list[Values]:
        each_checked(FunctionTool, tools)
        return [known(tool, FunctionTool) for tool in tools]


class WebSearchTool(Copied):
    """Accepted in the form that Codex sends with every request. The model is not told of it, so it never searches."""

    type: Literal["web_search"]
    external_web_access: bool


TOOLS: dict[str, type[Part]] = {"function": FunctionTool, "namespace": NamespaceTool, "web_search": WebSearchTool}


class ChosenFunction(Part):
    """The function that the model must call."""

    type: Literal["function"]
    name: NonEmpty


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class PlainFormat(Part):
    type: Literal["text", "json_object"]


class TextConfig(Part):
    format: Annotated[SchemaFormat | PlainFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Part):
    """`summary` has no effect: this server does not summarize thinking."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(SamplingBody, TranslatedBody):
    """A conversation to continue, as OpenAI's Responses API has it."""

    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "function.parameters": "parameters",
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingBody.neutral,
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "truncation": ("disabled",),
        "include": ([], ["reasoning.encrypted_content"]),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "service_tier": ("auto", "default"),
    }
    advice: ClassVar[dict[str, str]] = {
        "previous_response_id": "responses are not kept; send the whole conversation as input",
        "conversation": "responses are not kept; send the whole conversation as input",
    }
    expected: ClassVar[dict[str, str]] = {
        **SamplingBody.expected,
        "stop": EXPECTED_STOPS,
        "tool_choice": 'should be none, auto, required or {"type": "function", "name": "..."}',
    }

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stop: Stops = Field(default_factory=list)
    text: TextConfig | None = None
    # Unparsed: templates print them, and the response repeats them.
    tools: Annotated[list[Values], FAIL_FAST, typed(*TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: Values = Field(default_factory=dict)
    # Repeated in the response.
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=MAX_METADATA
    )
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    client_metadata: Values | None = None  # without effect

    @field_validator("tools")
    @classmethod
    def _are_tools(cls, tools: list[Values]) -> list[Values]:
        for number, tool in enumerate(tools):
            each_checked(TOOLS[tool["type"]], [tool], first=number)
        return [known(tool, TOOLS[tool["type"]]) for tool in tools]

    @cached_property
    def messages_of_chat(self) -> list[Message]:
        return with_system([self.instructions or ""], _messages(self.input))

    @property
    def chat_parameters(self) -> Values:
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "max_completion_tokens": self.max_output_tokens,
            "stop": self.stop,
            "response_format": self._response_format,
            "tools": [_chat_tool(tool, namespace) for namespace, tool in self._functions],
            # Without tools both are without effect; Codex sends them.
            "tool_choice": None if choice == "auto" else choice,
            "parallel_tool_calls": self.parallel_tool_calls or not any(self._functions),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    @property
    def _functions(self) -> Iterator[tuple[str | None, Values]]:
        """All functions, each with its namespace."""
        for tool in self.tools:
            if tool["type"] == "function":
                yield None, tool
            for function in tool["tools"] if tool["type"] == "namespace" else ():
                yield tool["name"], function

    def name_of(self, full_name: str) -> tuple[str | None, str]:
        """Namespace and name of a function that the model called."""
        for namespace, function in self._functions:
            if full_name == _full_name(function["name"], namespace):
                return namespace, function["name"]
        return None, full_name

    @property
    def _response_format(self) -> Values | None:
        format = None if self.text is None else self.text.format
        if isinstance(format, SchemaFormat):
            return {"type": "json_schema", "json_schema": {"schema": format.schema_}}
        return None if format is None else {"type": format.type}


def _chat_tool(tool: Values, namespace: str | None) -> Values:
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": {**function, "name": _full_name(tool["name"], namespace)}}


def _full_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _messages(items: Iterable[Item]) -> list[Message]:
    """Calls belong to the assistant's message before them, thinking to the one after it."""
    messages: list[Message] = []
    thinking: str | None = None
    for item in items:
        match item:
            case MessageItemParam():
                reasoning, thinking = thinking if item.role == "assistant" else None, None
                messages.append(Message(role=item.role, content=_text(item.content), reasoning_content=reasoning))
            case FunctionCallParam():
                function = FunctionCall(name=_full_name(item.name, item.namespace), arguments=item.arguments)
                call = ToolCallParam(id=item.call_id, function=function)
                if messages and messages[-1].role == "assistant" and thinking is None:
                    last = messages.pop()
                else:
                    last, thinking = Message(role="assistant", content="", reasoning_content=thinking), None
                messages.append(last.model_copy(update={"tool_calls": [*last.tool_calls, call]}))
            case FunctionCallOutput():
                messages.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            case ReasoningParam():
                thinking = "\n".join(part.text for part in item.content) or thinking
    return messages
