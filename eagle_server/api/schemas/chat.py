"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from eagle_server.api.schemas.base import Body, Copied, Part, check_size, each_checked, known, typed
from eagle_server.api.schemas.generation import FAIL_FAST, MAX_LOGPROBS, GenerationBody, NonEmpty
from eagle_server.api.schemas.grammar import finite
from eagle_server.text.message_forms import Written

Values = dict[str, Any]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TextPart(Copied):
    """A text part of a message's content. A refusal and thinking are parts of earlier answers."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "reasoning"]
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None
    reasoning: Any = None

    @model_validator(mode="after")
    def _has_text(self) -> TextPart:
        if self.text is None and self.type.endswith("text"):
            raise PydanticCustomError("missing_text", "is required", {"key": "text"})
        return self


def _text_part(text: str) -> Values:
    return {"type": "text", "text": text}


def _form(content: Any) -> str:
    return "#text" if isinstance(content, str) else "#parts"


_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning")
# Names of places leave out tags that begin with #.
Content = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[TextPart], FAIL_FAST, typed(*_PARTS, of_text=_text_part), Tag("#parts")],
    Discriminator(_form),
]


class FunctionCall(Copied):
    """The function of a tool call. `arguments`: a JSON object as text, or what a model wrote instead."""

    name: str = ""
    arguments: str = "{}"

    @property
    def values(self) -> Values:
        """The call as templates expect it: with its arguments as an object. If they are none, as they were written."""
        try:
            check_size(self.arguments)
            # Unlike `json`, it refuses half a surrogate pair, which no tokenizer takes.
            values = from_json(self.arguments or "{}")
        except ValueError:
            values = None
        return {"name": self.name, "arguments": values if isinstance(values, dict) else Written(self.arguments)}

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, arguments: Any) -> Any:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class CustomCall(Copied):
    """A call of a tool that takes a text."""

    name: str = ""
    input: str = ""


class ToolCallParam(Copied):
    """A tool call of an earlier assistant message."""

    id: str | None = None
    type: Any = None
    index: Any = None  # of a stream's pieces
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    @property
    def values(self) -> Values:
        """The call as templates expect it."""
        custom = self.custom or CustomCall()
        function = self.function or FunctionCall(name=custom.name, arguments=json.dumps({"input": custom.input}))
        return {"type": "function", "id": self.id, "function": function.values}


class Message(Copied):
    """One message. Parameters like `refusal` that clients send back as null are ignored.

    `reasoning` is vLLM's name of `reasoning_content`, the thinking before an earlier answer. `function_call` and the
    role `function` are older names of a tool call and of its result.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], FAIL_FAST] = Field(default_factory=list)
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing_content", "is required", {"key": "content"})
        if self.calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls belong to messages of the assistant")
        return self

    @property
    def calls(self) -> list[ToolCallParam]:
        """The calls of an assistant's message."""
        older = [] if self.function_call is None else [ToolCallParam(function=self.function_call)]
        return [*self.tool_calls, *older]

    @property
    def text(self) -> str:
        """The content as one text. Parts are joined by line breaks, as in vLLM. An answer may be a refusal."""
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            return self.refusal or ""
        texts = (part.refusal if part.text is None else part.text for part in self.content)
        return "\n".join(text for text in texts if text is not None)

    @property
    def thoughts(self) -> str | None:
        """The thinking before an answer."""
        content = () if isinstance(self.content, str) else self.content or ()
        parts = [_thinking(part.thinking or part.reasoning or "") for part in content]
        return self.reasoning_content or self.reasoning or "\n".join(filter(None, parts)) or None

    @property
    def values(self) -> Values:
        """The message as the template gets it."""
        values: Values = {"role": "tool" if self.role == "function" else self.role, "content": self.text}
        if calls := self.calls:
            values["tool_calls"] = [call.values for call in calls]
        fields = (("name", self.name), ("tool_call_id", self.tool_call_id), ("reasoning_content", self.thoughts))
        return values | {field: value for field, value in fields if value is not None}


def _thinking(value: Any) -> str:
    """The text of a part of thinking: a text, or text parts."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, dict) and part.get("text"))


class Function(Copied):
    name: NonEmpty
    description: str | None = None
    parameters: Annotated[Values, AfterValidator(finite)] | None = None
    strict: bool | None = None
    returns: Values | None = Field(None, alias="return")  # as transformers' get_json_schema writes it


class FunctionName(Part):
    name: NonEmpty


class NamedTool(Part):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class Tool(Copied):
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
        each_checked(Tool, tools)
        return [{**known(tool, Tool), "function": known(tool["function"], Function)} for tool in tools]

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
        if self.must_call and self.structured_outputs is not None:
            yield "structured_outputs", "and a tool_choice that asks for a call exclude each other"
