"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from eagle_server.api.schemas.base import Copied, Part, typed
from eagle_server.api.schemas.chat import FunctionCall, Message, ToolCallParam, Values
from eagle_server.api.schemas.generation import FAIL_FAST, NonEmpty, SamplingBody, StopTexts
from eagle_server.api.schemas.grammar import JsonSchema, finite
from eagle_server.api.schemas.translated import TranslatedBody, with_system

JsonObject = Annotated[Values, AfterValidator(finite)]


class CacheControl(Part):
    """Without effect: the prefix cache needs no marks."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Copied):
    cache_control: Any = None  # without effect


class TextBlockParam(Block):
    type: Literal["text"]
    text: str
    citations: Any = None


def _text_block(text: str) -> Values:
    return {"type": "text", "text": text}


Texts = Annotated[
    list[TextBlockParam], FAIL_FAST, typed("text", of_text=_text_block, schema=str | list[TextBlockParam])
]


def _text(blocks: Iterable[TextBlockParam]) -> str:
    """Blocks are joined by line breaks, as the parts of a chat's message."""
    return "\n".join(block.text for block in blocks)


class ToolUseParam(Block):
    """A tool call of an earlier answer. `input` should be an object, but may be what a client made of a cut call."""

    type: Literal["tool_use"]
    id: str = ""
    name: str = ""
    input: Any = Field(default_factory=dict)
    caller: Any = None

    @property
    def call(self) -> ToolCallParam:
        arguments = self.input if isinstance(self.input, str) else json.dumps(self.input, ensure_ascii=False)
        return ToolCallParam(id=self.id, function=FunctionCall(name=self.name, arguments=arguments))


class ToolResultParam(Block):
    """What the tool returned. Templates have no place for `is_error`: the content says it."""

    type: Literal["tool_result"]
    tool_use_id: str = ""
    content: Texts = Field(default_factory=list)
    is_error: Any = None


class ThinkingParam(Block):
    """Thinking of an earlier answer. Redacted thinking is dropped."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: Any = None
    data: Any = None


BlockParam = Annotated[TextBlockParam | ToolUseParam | ToolResultParam | ThinkingParam, Field(discriminator="type")]
Blocks = Annotated[
    list[BlockParam],
    FAIL_FAST,
    typed(
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        of_text=_text_block,
        schema=str | list[BlockParam],
    ),
]


OWNERS = {
    "tool_use": "assistant",
    "tool_result": "user",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}


class AnthropicMessage(Copied):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @field_validator("content")
    @classmethod
    def _belong_to_the_role(cls, blocks: list[BlockParam], info: ValidationInfo) -> list[BlockParam]:
        role = info.data.get("role")
        for block in blocks:
            owner = OWNERS.get(block.type, role)
            if owner != role:
                raise PydanticCustomError("role", f"{block.type} belongs to messages of the {owner}")
        return blocks

    @property
    def of_chat(self) -> Iterator[Message]:
        """Each tool result is a message of its own. They come first, as the calls before them must be answered."""
        results = [block for block in self.content if isinstance(block, ToolResultParam)]
        for result in results:
            yield Message(role="tool", content=_text(result.content), tool_call_id=result.tool_use_id)
        texts = [block for block in self.content if isinstance(block, TextBlockParam)]
        calls = [block.call for block in self.content if isinstance(block, ToolUseParam)]
        thinking = "\n".join(block.thinking for block in self.content if block.type == "thinking")
        if texts or not results:
            yield Message(role=self.role, content=_text(texts), tool_calls=calls, reasoning_content=thinking or None)


class InputTool(Block):
    """A tool that the model may call. Its input is sent once it is complete: `eager_input_streaming` has no effect."""

    type: Literal["custom"]
    name: NonEmpty
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None

    @property
    def of_chat(self) -> Values:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: NonEmpty | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_where_due(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise PydanticCustomError("name", "name belongs to type tool, and to no other")
        return self

    @property
    def of_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Part):
    """Whether to think is a hint for the template. Nothing but max_tokens bounds it. `omitted`: it is not shown."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(JsonSchema):
    type: Literal["json_schema"]


class OutputConfig(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class KeptThinking(Part):
    type: Literal["thinking_turns", "all"]
    value: int | None = Field(None, ge=1)


def _kept(value: Any) -> Any:
    return {"type": "all"} if value == "all" else value


class ContextEdit(Part):
    """Drops the thinking of all earlier answers but the last ones."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[KeptThinking, BeforeValidator(_kept)] = KeptThinking(type="thinking_turns", value=1)

    def apply(self, messages: list[Message]) -> list[Message]:
        places = [place for place, message in enumerate(messages) if message.reasoning_content]
        kept = len(places) if self.keep.type == "all" else self.keep.value or 1
        cleared = {*places[:-kept]}
        return [
            message.model_copy(update={"reasoning_content": None}) if place in cleared else message
            for place, message in enumerate(messages)
        ]


class ContextManagement(Part):
    edits: list[ContextEdit] = Field(default_factory=list)


class AnthropicConversation(TranslatedBody):
    """What both endpoints take: all that decides the prompt."""

    names: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "response_format": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "function.parameters": "input_schema",
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    messages: Annotated[list[AnthropicMessage], Field(min_length=1), FAIL_FAST]
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[InputTool], FAIL_FAST, typed("custom", default="custom")] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: Values = Field(default_factory=dict)

    @cached_property
    def messages_of_chat(self) -> list[Message]:
        messages = [message for param in self.messages for message in param.of_chat]
        for edit in () if self.context_management is None else self.context_management.edits:
            messages = edit.apply(messages)
        return with_system([_text(self.system)], messages)

    @property
    def chat_parameters(self) -> Values:
        choice, format = self.tool_choice, None if self.output_config is None else self.output_config.format
        last = self.messages_of_chat[-1]
        return {
            "tools": [tool.of_chat for tool in self.tools],
            # Without tools both are without effect.
            "tool_choice": None if choice is None or choice.type == "auto" else choice.of_chat,
            "parallel_tool_calls": choice is None or not (choice.disable_parallel_tool_use and self.tools),
            "response_format": format and {"type": "json_schema", "json_schema": {"schema": format.schema_}},
            "reasoning_effort": self._effort,
            # The answer continues an assistant's message at the end of the conversation.
            "continue_final_message": last.role == "assistant" and not last.tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    @property
    def _effort(self) -> str | None:
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return "xhigh" if effort == "max" else effort
        if self.thinking.type == "disabled":
            return "none"
        return "xhigh" if effort == "max" else effort or "medium"


class MessagesRequest(SamplingBody, AnthropicConversation):
    """A conversation to answer, as Anthropic's Messages API has it."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingBody.neutral,
        **AnthropicConversation.neutral,
        "service_tier": ("auto", "standard_only"),
    }
    requires_max_tokens: ClassVar[bool] = True

    max_tokens: int = Field(ge=1)
    stop_sequences: StopTexts = Field(default_factory=list)
    metadata: Values | None = None  # without effect

    @property
    def omits_thinking(self) -> bool:
        """Whether the answer shall not show its thinking."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def chat_parameters(self) -> Values:
        return {**super().chat_parameters, "max_tokens": self.max_tokens, "stop": self.stop_sequences}


class CountTokensRequest(AnthropicConversation):
    """A conversation whose tokens are counted."""

    model: str | None = None
