"""What both kinds of answers carry beside their choices: token counts and vLLM's metrics."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType

from eagle_server.request import SpecStats, TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


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


class PromptLogprob(msgspec.Struct):
    """vLLM's. `rank` is 1 for the best token; null for one that is not among the alternatives asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


# One entry per prompt token, null for the first: the token itself and the alternatives, by token id.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs_of(entries: list[TokenLogprob], count: int, spell: Callable[[int], str]) -> PromptLogprobs:
    """The first `count` alternatives of each entry, and the token itself."""
    scores: PromptLogprobs = [None]
    for entry in entries:
        top = entry.top[:count]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, start=1)}
        scores.append(
            {
                str(token_id): PromptLogprob(finite(logprob), ranks.get(token_id), spell(token_id))
                for token_id, logprob in ((entry.token_id, entry.logprob), *top)
            }
        )
    return scores


def json_response(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
