"""Shares the prompt tokens of a cycle between the requests that are prefilling."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from eagle_server.plan import Chunk
from eagle_server.scheduling.sequence import Sequence


def make_chunks(prefilling: Seq[Sequence], budget: int) -> list[tuple[Sequence, Chunk]]:
    """The next chunks of `prefilling`, which are in order of arrival: `budget` tokens at most.

    Half of the budget goes to the oldest request. The rest goes to those with the fewest tokens left, counted in such
    halves, so that requests of about the same length stay in order. A short prompt does not wait for a long one; and
    every prompt has half of the budget at the latest when all older ones are computed.
    """
    if not prefilling:
        return []
    half = -(-budget // 2)
    # The last token waits until the grammar's mask is ready.
    rest = {sequence: sequence.uncomputed_tokens - (not sequence.is_ready) for sequence in prefilling}
    lengths = dict.fromkeys(prefilling, 0)
    shares = [(prefilling[0], half), *((sequence, budget) for sequence in _shortest_first(prefilling, half))]
    for sequence, most in shares:
        length = min(rest[sequence] - lengths[sequence], most, budget)
        lengths[sequence] += length
        budget -= length
    return [(sequence, _chunk(sequence, length)) for sequence, length in lengths.items() if length]


def _shortest_first(prefilling: Seq[Sequence], unit: int) -> list[Sequence]:
    return sorted(prefilling, key=lambda sequence: -(-sequence.uncomputed_tokens // unit))


def _chunk(sequence: Sequence, length: int) -> Chunk:
    start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + length
    return Chunk(
        req_pool_index=sequence.req_pool_index,
        start=start,
        tokens=tuple(sequence.tokens[start:end]),
        next_token=sequence.tokens[end] if end < sequence.num_prefill_tokens else None,
        sampling=sequence.sampling,
        prompt_logprobs=sequence.request.prompt_logprobs and sequence.output_length == 0,
        all_tokens=sequence.tokens,
        grammar_matcher=sequence.grammar_matcher,
        shares_text=sequence.request.cache_salt is None,
    )
