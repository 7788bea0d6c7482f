"""The bodies of /v1/completions answers, in OpenAI's shape with vLLM's metrics."""

from __future__ import annotations

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType

from eagle_server.request import SpecStats


class Logprobs(msgspec.Struct):
    """One entry per token. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)

    def extend(self, other: Logprobs) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


class ChoiceBody(msgspec.Struct):
    """A choice, or on a stream a piece of one."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class SpeculativeMetrics(msgspec.Struct):
    """vLLM's per-request metrics (vllm#48915).

    A step is one verify cycle. acceptance_histogram[a] counts the steps that accepted a drafted tokens; the bonus token
    is in mean_acceptance_length only. num_draft_tokens counts proposed tree nodes, num_spec_tokens is the tree's depth.
    `acceptance` names the rule where it was a lossy one.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance: str | UnsetType = UNSET

    @classmethod
    def of(cls, spec: SpecStats | None) -> SpeculativeMetrics | None:
        """None where nothing was speculated."""
        if spec is None or not spec.drafted:
            return None
        return cls(
            mean_acceptance_length=spec.mean_acceptance_length,
            draft_acceptance_rate=spec.accepted / spec.drafted,
            acceptance_histogram=spec.histogram,
            num_spec_steps=spec.cycles,
            num_accepted_draft_tokens=spec.accepted,
            num_draft_tokens=spec.drafted,
            num_spec_tokens=len(spec.histogram) - 1,
            acceptance=spec.lossy or UNSET,
        )


class Metrics(msgspec.Struct):
    speculative_decoding: SpeculativeMetrics | None


class CompletionBody(msgspec.Struct, kw_only=True):
    """An answer, or an event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: Usage | None | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


def json_response(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
