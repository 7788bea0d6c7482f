"""The common parts of the endpoints' responses: usage, metrics, log-probabilities and draft trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from eagle_server.api.errors import bad_request
from eagle_server.api.schemas.generation import GenerationBody
from eagle_server.request import DraftTree, SpecStats, TokenLogprob

MAX_SCORES = 2**22  # log-probabilities in a response that is not streamed; each takes up to 50 bytes until it is sent
SCORES_OF_TREE = 32  # log-probabilities that take as much memory as a draft tree
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """OpenAI's. Accepted and rejected tokens together are the drafted ones that the target verified."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int

    @classmethod
    def of(cls, reasoning: int, specs: Iterable[SpecStats | None]) -> CompletionTokensDetails:
        """`specs`: of the choices, which have them once they have ended. None: nothing was drafted."""
        known = [spec for spec in specs if spec is not None]
        accepted = sum(spec.accepted for spec in known)
        return cls(reasoning, accepted, sum(spec.drafted for spec in known) - accepted)


class Usage(msgspec.Struct):
    """Token counts. A prompt counts once, for any number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, details: CompletionTokensDetails) -> Usage:
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)


class SpeculativeMetrics(msgspec.Struct, omit_defaults=True):
    """vLLM's per-request metrics (vllm#48915).

    A step is one verify cycle. acceptance_histogram[a] counts the steps that accepted `a` drafted tokens. Only
    mean_acceptance_length includes the bonus token. num_draft_tokens counts the nodes of the drafted trees without the
    roots. num_spec_tokens is the tree's depth. `acceptance` names a lossy acceptance rule.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance: str | None = None

    @classmethod
    def of(cls, spec: SpecStats | None) -> SpeculativeMetrics | None:
        """None if nothing was drafted."""
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
            acceptance=spec.lossy,
        )


class Metrics(msgspec.Struct):
    speculative_decoding: SpeculativeMetrics | None


class PromptLogprob(msgspec.Struct):
    """vLLM's. `rank` is 1 for the best token, null for a token outside the requested alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


# A part of a response, or its JSON: the encoder copies it, and it takes less memory.
T = TypeVar("T")
Encoded: TypeAlias = T | msgspec.Raw
# One entry per prompt token, null for the first one. An entry has the token and its alternatives, by token id.
PromptLogprobs = list[Encoded[dict[str, PromptLogprob]] | None]


class TreeBody(msgspec.Struct):
    """The draft tree of one cycle: `request.DraftTree` with spelled tokens."""

    tokens: list[str]
    parents: list[int]
    scores: list[float] | None
    accepted: list[int]
    bonus: str | None
    steps: int
    seconds: float


def encoded(part: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(part))


def possible_scores(body: GenerationBody, prompt_tokens: int, max_tokens: int) -> Counter[str]:
    """The most scores that the response may have, by parameter. Both numbers are sums over the prompts.

    The scores of outputs without a length limit are not included. They are counted when they arrive.
    """
    prompts = body.candidates * prompt_tokens
    output = 0 if body.max_output_tokens is None else body.candidates * max_tokens
    return scores_of(body, output + (prompts if body.echoes else 0), prompts, output)


def scores_of(body: GenerationBody, tokens: int, prompt_tokens: int, trees: int) -> Counter[str]:
    """The number of scores, by parameter, for these numbers of tokens, prompt tokens and draft trees."""
    scores: Counter[str] = Counter()
    if body.num_logprobs is not None:
        name = body.logprobs_param if body.logprobs_param in body.model_fields_set else "logprobs"
        scores[name] = tokens * (1 + body.num_logprobs)
    if body.prompt_logprobs is not None:
        scores["prompt_logprobs"] = prompt_tokens * (1 + body.prompt_logprobs)
    if body.return_trees:
        scores["return_trees"] = trees * SCORES_OF_TREE
    return scores


def check_scores(body: GenerationBody, scores: Counter[str]) -> None:
    """Check the number of scores by parameter. A stream may have any number, because it sends them as they come.

    Raises:
        ApiError: more than MAX_SCORES.
    """
    total = scores.total()
    if body.stream or total <= MAX_SCORES:
        return
    param = max(scores, key=lambda name: scores[name])
    causes = ("n", "max_tokens", "max_completion_tokens", "echo", *scores)
    parameters = ", ".join(name for name in causes if name in body.model_fields_set)
    message = (
        f"{param}: {total} log-probabilities, but a response that is not streamed may have {MAX_SCORES}: choices x "
        f"tokens x (1 + alternatives); a draft tree counts as {SCORES_OF_TREE}. Lower or drop: {parameters}"
    )
    if body.prompt_logprobs is None:
        message += "; or stream"
    raise bad_request(message, param, "invalid_value")


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs_of(entries: list[TokenLogprob], count: int, spell: Callable[[int], str]) -> PromptLogprobs:
    """The first `count` alternatives of each entry, and the token itself."""
    scores: PromptLogprobs = [None]
    for entry in entries:
        top = entry.top[:count]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, start=1)}
        shown = {
            str(token_id): PromptLogprob(finite(logprob), ranks.get(token_id), spell(token_id))
            for token_id, logprob in ((entry.token_id, entry.logprob), *top)
        }
        scores.append(encoded(shown))
    return scores


def trees_of(trees: Sequence[DraftTree], spell: Callable[[int], str]) -> list[TreeBody]:
    """The trees of successive cycles."""
    return [
        TreeBody(
            tokens=[spell(token_id) for token_id in tree.token_ids],
            parents=tree.parents,
            scores=None if tree.scores is None else [finite(score) for score in tree.scores],
            accepted=tree.path,
            bonus=None if tree.bonus is None else spell(tree.bonus),
            steps=tree.steps,
            seconds=tree.seconds,
        )
        for tree in trees
    ]
