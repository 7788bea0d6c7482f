"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field

from eagle_server.api.schemas.generation import FAIL_FAST, MAX_CHOICES, MAX_LOGPROBS, GenerationBody, TokenIds

Texts = Annotated[list[str], FAIL_FAST]
TokenIdLists = Annotated[list[TokenIds], FAIL_FAST]


class CompletionRequest(GenerationBody):
    """A prompt to continue, or several."""

    prompt_param: ClassVar[str] = "prompt"
    logprobs_param: ClassVar[str] = "logprobs"
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.neutral,
        "suffix": ("",),
        "add_special_tokens": (True,),
        "separate_reasoning": (True, False),
        "stream_reasoning": (True, False),
    }
    expected: ClassVar[dict[str, str]] = {
        **GenerationBody.expected,
        "prompt": "should be a string, a list of strings, a list of token ids or a list of lists of token ids",
    }

    prompt: str | Texts | TokenIds | TokenIdLists
    max_tokens: int = Field(16, ge=0)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @property
    def max_output_tokens(self) -> int:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @cached_property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: a text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.candidates

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.candidates < self.n:
            yield "best_of", f"should be at least n, {self.n}"
        if self.candidates > self.n and self.stream:
            yield "best_of", "larger than n needs stream: false: the best are known at the end"
        if self.echo and self.truncate_prompt_tokens is not None:
            yield "truncate_prompt_tokens", "and echo exclude each other"
        if self.min_tokens > self.max_tokens:
            yield "min_tokens", f"exceeds max_tokens, {self.max_tokens}"
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            yield "max_tokens", "should be at least 1 without echo or prompt_logprobs"
