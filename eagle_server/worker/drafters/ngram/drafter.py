"""N-gram drafting without a model: propose what followed the last tokens of a text where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_server.ops.upload import upload
from eagle_server.plan import Decode, GrammarMatcher, allows
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import EagleVerifyInput, TreeNodes
from eagle_server.worker.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.ngram.shared_texts import SharedTexts, blended
from eagle_server.worker.drafters.ngram.suffix_automaton import LONGEST, SuffixAutomaton, Trie

CERTAIN = 0.95  # expected accepted tokens over the most that a trie could give: no other drafter is asked then
_SPARE = 4  # with a grammar, which may refuse nodes, this many times as many are looked at
_PIECE = 64  # new tokens of a running request before they are shared


@dataclass
class _Reader:
    """A request's automaton, its growing list of tokens, and how many of them are shared already."""

    text: Sequence[int]
    automaton: SuffixAutomaton
    shared: int = 0


class NgramTries:
    """The suffix automata of the running requests, by req_pool_index; with `shared` also the texts of all requests.

    Without sharing, a trie is a function of its request's text alone. An automaton takes about 0.5 kB of host memory
    and a few microseconds per token. A prompt is read in the request's first cycle.
    """

    def __init__(self, depth: int, num_draft_tokens: int, shared: SharedTexts | None = None) -> None:
        self.depth, self.max_nodes, self.shared = depth, num_draft_tokens - 1, shared
        self._readers: dict[int, _Reader] = {}

    def forget(self, req_pool_index: int) -> None:
        reader = self._readers.pop(req_pool_index, None)
        if reader is not None:
            self._share(reader, least=1)

    def is_certain(self, trie: Trie) -> bool:
        """Whether other drafters could hardly improve on this trie."""
        return trie.expected >= CERTAIN * min(self.depth, self.max_nodes)

    def of(self, decode: Decode) -> Trie:
        """Continuations of the request's text: at most `max_nodes`, none if its end did not occur before."""
        reader = self._readers.get(decode.req_pool_index)
        # A request's list only grows. Another list belongs to another request, whatever it holds.
        if reader is None or reader.text is not decode.text or len(decode.text) < reader.automaton.length:
            reader = self._readers[decode.req_pool_index] = _Reader(decode.text, SuffixAutomaton(self.depth))
        known = reader.automaton.length
        reader.automaton.extend(decode.text[known:])
        own = self._allowed(reader.automaton.continuations(self._wanted(decode)), decode)
        if self.shared is None:
            return own
        self._share(reader, least=_PIECE)
        if self.is_certain(own):
            return own
        shared = self._allowed(self.shared.continuations(decode.text, self._wanted(decode)), decode)
        return blended(own, shared, self.max_nodes)

    def _wanted(self, decode: Decode) -> int:
        """How many nodes to ask for, since a grammar may refuse some."""
        return self.max_nodes if decode.grammar_matcher is None else _SPARE * self.max_nodes

    def _allowed(self, trie: Trie, decode: Decode) -> Trie:
        """The best `max_nodes` nodes, restricted to tokens that the request's grammar allows."""
        if decode.grammar_matcher is None:
            return trie
        return _allowed_nodes(trie, decode.text, decode.grammar_matcher, self.max_nodes)

    def _share(self, reader: _Reader, least: int) -> None:
        """Share the new tokens of a text, if they are at least `least`."""
        if self.shared is not None and len(reader.text) - reader.shared >= least:
            start = max(reader.shared - LONGEST, 0)
            self.shared.add(reader.text[start:], known=reader.shared - start)
            reader.shared = len(reader.text)


class NgramDrafter:
    """A trie per request, padded to `max_nodes`. A request without a match drafts nothing."""

    uses_features = False

    def __init__(self, tries: NgramTries) -> None:
        self.tries = tries

    def forget(self, req_pool_index: int) -> None:
        self.tries.forget(req_pool_index)

    def prefill(self, prompts: Prompts) -> None:
        return None

    def extend(self, batch: DecodeBatch) -> None:
        return None

    def propose(self, draft: None, batch: DecodeBatch) -> TreeNodes:
        tries = [self.tries.of(decode) for decode in batch.decodes]
        numbers = upload(packed(tries, len(batch.seq_lens_host), self.tries.max_nodes), batch.seq_lens.device)
        return TreeNodes(numbers[0], numbers[1], spec_steps=self.tries.depth)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        return None


def _allowed_nodes(trie: Trie, text: Sequence[int], grammar_matcher: GrammarMatcher, count: int) -> Trie:
    """The first `count` nodes of a trie that the grammar allows after `text`."""
    kept = Trie([], [], [], trie.context)
    numbers = [0]  # of each trie node among the kept ones, -1: refused
    paths: list[tuple[int, ...]] = [()]  # of the kept nodes
    for token, parent, estimate in zip(trie.tokens, trie.parents, trie.estimates, strict=True):
        above = numbers[parent]
        mask = grammar_matcher.mask(text, paths[above]) if above >= 0 and len(kept.tokens) < count else None
        if mask is None or not allows(mask, token):
            numbers.append(-1)
            continue
        numbers.append(len(paths))
        paths.append((*paths[above], token))
        kept.tokens.append(token)
        kept.parents.append(above)
        kept.estimates.append(estimate)
    return kept


SCALE = 1 << 20  # estimates are uploaded as integers, in one tensor with the tokens


def packed(tries: Sequence[Trie], size: int, width: int) -> NDArray[np.int64]:
    """Tokens, parents and estimates times SCALE, int64 [3, size, width]. Padding is token -1 under the root."""
    numbers = np.zeros((3, size, width), dtype=np.int64)
    numbers[0] = -1
    for row, trie in enumerate(tries):
        count = len(trie.tokens)
        numbers[0, row, :count] = trie.tokens
        numbers[1, row, :count] = trie.parents
        numbers[2, row, :count] = [round(estimate * SCALE) for estimate in trie.estimates]
    return numbers
