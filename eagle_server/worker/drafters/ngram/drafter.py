"""N-gram drafting without a model: propose what followed the last tokens of a text where they occurred before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.plan import Chunk, Decode, GrammarMatcher, TreeShape, allows
from eagle_server.speculation.tree import Tree, build_tree
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.ngram.coupled_estimates import coupled_estimates
from eagle_server.worker.drafters.ngram.suffix_automaton import LONGEST, SuffixAutomaton, Trie

CERTAIN = 0.95  # expected accepted tokens over the most that a trie could give: no other drafter is asked then
_SPARE = 4  # with a grammar, which may refuse nodes, this many times as many are looked at
_GROWTH = 256  # tokens of a request that are read at once even if others have used up the cycle's limit
_PER_CYCLE = 2048  # tokens of all requests' backlogs that are read in a cycle: about 10 ms
_MOST = 1 << 17  # tokens in an automaton; of a longer text the newest half of that many are read


@dataclass
class _Reader:
    """A request's growing list of tokens, and its automaton of those from `start` on."""

    tokens: Sequence[int]
    automaton: SuffixAutomaton
    start: int = 0

    @property
    def end(self) -> int:
        """How far the text is read."""
        return self.start + self.automaton.length


class NgramTries:
    """The suffix automata of the running requests, by req_pool_index.

    An automaton takes 20 to 200 bytes of host memory and a few microseconds per token. A long prompt is read during the
    cycles that prefill it, and then during as many more as it needs. Until then its tries come from what was read.
    The trie of a text that was read to its end is a function of its newest tokens alone.
    """

    def __init__(self, steps: int, nodes: int, *, coupling: bool = True) -> None:
        """`coupling`: above temperature 0, rank by the noise of the target's draws as well."""
        self.steps, self.coupling = steps, coupling
        self.drafts = nodes - 1  # the most nodes of a trie, which leaves the root out
        self._readers: dict[int, _Reader] = {}

    def forget(self, req_pool_index: int) -> None:
        self._readers.pop(req_pool_index, None)

    def read(self, scheduled: Sequence[Decode | Chunk], limit: int = _PER_CYCLE) -> None:
        """Read on in the requests' texts, `limit` tokens in all."""
        for request in scheduled:
            limit -= self._read(self._reader(request), limit)

    def read_prompts(self, chunks: Sequence[Chunk]) -> None:
        """Read on while prompts are prefilled: the target's forward takes longer than reading as many tokens."""
        self.read(chunks, max(_PER_CYCLE, sum(len(chunk.tokens) for chunk in chunks)))

    def is_certain(self, trie: Trie) -> bool:
        """Whether other drafters could hardly improve on this trie."""
        return trie.expected >= CERTAIN * min(self.steps, self.drafts)

    def trie_of(self, decode: Decode) -> Trie:
        """Continuations of the request's text: at most `drafts` nodes, none if its end did not occur before."""
        reader = self._reader(decode)
        self._read(reader, _GROWTH)
        tail = None if reader.end == len(decode.all_tokens) else decode.all_tokens[-LONGEST:]
        coupled = coupled_estimates(decode) if self.coupling else None
        matcher = decode.grammar_matcher
        if matcher is None:
            return reader.automaton.continuations(self.drafts, tail, coupled)
        wanted = _SPARE * self.drafts  # since the grammar may refuse some
        return _allowed_nodes(
            reader.automaton.continuations(wanted, tail, coupled), decode.all_tokens, matcher, self.drafts
        )

    def _reader(self, scheduled: Decode | Chunk) -> _Reader:
        tokens, reader = scheduled.all_tokens, self._readers.get(scheduled.req_pool_index)
        # A request's list only grows. Another list belongs to another request, whatever it holds.
        if reader is None or reader.tokens is not tokens or len(tokens) < reader.end:
            reader = _Reader(tokens, SuffixAutomaton(self.steps))
            self._readers[scheduled.req_pool_index] = reader
        if len(tokens) - reader.start > _MOST:
            reader.start, reader.automaton = len(tokens) - _MOST // 2, SuffixAutomaton(self.steps)
        return reader

    @staticmethod
    def _read(reader: _Reader, limit: int) -> int:
        """Read at most `limit` tokens on. Returns how many there were."""
        tokens = reader.tokens[reader.end : reader.end + max(limit, 0)]
        reader.automaton.extend(tokens)
        return len(tokens)


class NgramDrafter:
    """A trie per request, padded to `drafts`. A request without a match drafts nothing."""

    uses_features = extends_ahead = proposes_ahead = reads_late = False
    widest = 1

    def __init__(self, tries: NgramTries) -> None:
        self.tries, self.steps = tries, tries.steps

    def forget(self, req_pool_index: int) -> None:
        self.tries.forget(req_pool_index)

    def prefill(self, prompts: Prompts) -> None:
        self.tries.read_prompts(prompts.chunks)

    def extend(self, batch: DecodeBatch) -> None:
        return None

    def propose(self, draft: None, batch: DecodeBatch) -> Tree:
        self.tries.read(batch.decodes)
        tries = [self.tries.trie_of(decode) for decode in batch.decodes]
        numbers = upload(packed(tries, len(batch.seq_lens_host), self.tries.drafts), batch.seq_lens.device)
        return trie_tree(batch.verified_id, batch.seq_lens, numbers, self.steps)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        return 0, 0


def _allowed_nodes(trie: Trie, tokens: Sequence[int], grammar_matcher: GrammarMatcher, count: int) -> Trie:
    """The first `count` nodes of a trie that the grammar allows after `tokens`."""
    kept = Trie([], [], [])
    numbers = [0]  # of each trie node among the kept ones, -1: refused
    paths: list[tuple[int, ...]] = [()]  # of the kept nodes
    for token, parent, estimate in zip(trie.tokens, trie.parents, trie.estimates, strict=True):
        above = numbers[parent]
        mask = grammar_matcher.mask(tokens, paths[above]) if above >= 0 and len(kept.tokens) < count else None
        if mask is None or not allows(mask, token):
            numbers.append(-1)
            continue
        numbers.append(len(paths))
        paths.append((*paths[above], token))
        kept.tokens.append(token)
        kept.parents.append(above)
        kept.estimates.append(estimate)
    return kept


_SCALE = 1 << 20  # scores are uploaded as integers, in one tensor with the tokens


def packed(tries: Sequence[Trie], size: int, width: int) -> NDArray[np.int64]:
    """Tokens, parents and path scores times 2^20, int64 [3, size, width]. Padding is token -1 under the root."""
    numbers = np.zeros((3, size, width), dtype=np.int64)
    numbers[0] = -1
    for row, trie in enumerate(tries):
        count, scores = len(trie.tokens), [0.0]
        for parent, estimate in zip(trie.parents, trie.estimates, strict=True):
            scores.append(scores[parent] + math.log(estimate))
        numbers[0, row, :count] = trie.tokens
        numbers[1, row, :count] = trie.parents
        numbers[2, row, :count] = [round(score * _SCALE) for score in scores[1:]]
    return numbers


def trie_tree(verified_id: Tensor, seq_lens: Tensor, numbers: Tensor, steps: int) -> Tree:
    """What `packed` has packed, under verified_id [bs] at positions seq_lens [bs]."""
    tokens, parents, scaled = numbers
    scores = (scaled.float() / _SCALE).masked_fill(tokens < 0, -math.inf)
    return build_tree(verified_id, seq_lens, tokens, parents, steps, scores)
