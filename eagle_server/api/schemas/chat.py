"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from eagle_server.api.schemas.base import TEXT_ONLY, Body, Part, TooManyValues, check_size
from eagle_server.api.schemas.generation import FAIL_FAST, MAX_LOGPROBS, GenerationBody, NonEmpty
from eagle_server.api.schemas.grammar import finite

Values = dict[str, Any]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TextPart(Part):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Part):
    """The function of a tool call. `arguments` is a JSON object as text."""

    name: NonEmpty
    arguments: str = "{}"

    @property
    def values(self) -> Values:
        """The call with its arguments as an object, as templates expect."""
        values = from_json(self.arguments or "{}")
        return {"name": self.name, "arguments": values}

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, arguments: str) -> str:
        try:
            check_size(arguments)
            # Unlike `json`, it refuses half a surrogate pair, which no tokenizer takes.
            fits = isinstance(from_json(arguments or "{}"), dict)
        except TooManyValues as error:
            raise PydanticCustomError("arguments", "has {problem}", {"problem": str(error)}) from None
        except ValueError:
            fits = False
        if not fits:
            raise PydanticCustomError("arguments", "should be a JSON object as text")
        return arguments


class ToolCallParam(Part):
    """A tool call of an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Part):
    """One message. Parameters like `refusal` that clients send back as null are ignored.

    `reasoning` is vLLM's name of `reasoning_content`, the thinking before an earlier answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FAIL_FAST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], FAIL_FAST] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        if not isinstance(content, str | list):
            raise PydanticCustomError("content", "should be a string or a list of text parts")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise PydanticCustomError("part", f"part {number} is of type {kind!r}; {TEXT_ONLY}")
            if kind is None or not isinstance(part.get("text"), str):
                raise PydanticCustomError("part", f'part {number} should be {{"type": "text", "text": "..."}}')
        return content

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "content is required")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls belong to messages of the assistant")
        return self

    @property
    def text(self) -> str:
        """The content as one text. Parts are joined by line breaks, as in vLLM."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    @property
    def values(self) -> Values:
        """The message as the template gets it."""
        values: Values = {"role": self.role, "content": self.text}
        if self.tool_calls:
            values["tool_calls"] = [
                {"type": "function", "id": call.id, "function": call.function.values} for call in self.tool_calls
            ]
        thinking = self.reasoning_content or self.reasoning
        for field, value in (("name", self.name), ("tool_call_id", self.tool_call_id), ("reasoning_content", thinking)):
            if value is not None:
                values[field] = value
        return values


class Function(Part):
    name: NonEmpty
    description: str | None = None
    parameters: Annotated[Values, AfterValidator(finite)] | None = None
    strict: bool | None = None


class FunctionName(Part):
    name: NonEmpty


class NamedTool(Part):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class Tool(Part):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


Messages = Annotated[list[Message], Field(min_length=1), FAIL_FAST]


class Rendering(Body):
    """The parameters by which the template turns messages into text."""

    # Unparsed: templates print them, and the order of keys matters.
    tools: Annotated[list[Values], FAIL_FAST] = Field(default_factory=list)
    chat_template_kwargs: Values = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @field_validator("tools")
    @classmethod
    def _are_functions(cls, tools: list[Values]) -> list[Values]:
        for tool in tools:
            Tool.model_validate(tool)
        return tools

    @property
    def generation_prompt(self) -> bool:
        """Whether the text ends with the beginning of the assistant's reply."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def offered_tools(self) -> list[Values]:
        return self.tools

    @property
    def hints(self) -> Values:
        """Variables for templates that read them."""
        return {}

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.continue_final_message and self.add_generation_prompt:
            yield "continue_final_message", "and add_generation_prompt exclude each other"


class ChatRequest(GenerationBody, Rendering):
    """A conversation to answer."""

    prompt_param: ClassVar[str] = "messages"
    logprobs_param: ClassVar[str] = "top_logprobs"
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.neutral,
        "add_special_tokens": (False,),
        "echo": (False,),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none",),
        "include_reasoning": (True,),
    }

    expected: ClassVar[dict[str, str]] = {
        **GenerationBody.expected,
        "tool_choice": 'should be none, auto, required or {"type": "function", "function": {"name": "..."}}',
    }

    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    reasoning_effort: ReasoningEffort | None = None

    @property
    def hints(self) -> Values:
        if self.reasoning_effort is None:
            return {}
        thinks = self.reasoning_effort != "none"
        return {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[Values]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def named_function(self) -> str | None:
        """The function that must be called, if the request names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or self.named_function is not None

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            yield "max_tokens", f"differs from max_completion_tokens, {self.max_completion_tokens}; drop one of them"
        if self.max_output_tokens is not None and self.min_tokens > self.max_output_tokens:
            yield "min_tokens", f"exceeds {self.name('max_completion_tokens')}, {self.max_output_tokens}"
        if self.top_logprobs is not None and not self.logprobs:
            yield "top_logprobs", "needs logprobs: true"
        yield from self._problems_of_tools()

    def _problems_of_tools(self) -> Iterator[tuple[str, str]]:
        if self.tool_choice not in (None, "none") and not self.tools:
            yield "tool_choice", "needs tools"
        if not (self.parallel_tool_calls or self.tools):
            yield "parallel_tool_calls", "needs tools"
        name = self.named_function
        if name is not None and all(tool["function"]["name"] != name for tool in self.tools):
            yield "tool_choice", f"names {name!r}, which is none of the tools"
        if self.must_call and self.grammar is not None:
            param = "response_format" if self.structured_outputs is None else "structured_outputs"
            yield self.name(param), "and a tool_choice that asks for a call exclude each other"
