"""N-gram drafting: no model, but what followed the end of a request's text where it occurred before."""

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

CERTAIN = 0.95  # of the tokens that a trie could give at most, so many are expected of it
_SPARE = 4  # times as many nodes are looked at where a grammar may refuse them
_PIECE = 64  # new tokens of a running request that are worth telling the others


@dataclass
class _Reader:
    """A request's automaton, the list of tokens that it reads as that grows, and how many of them others know."""

    text: Sequence[int]
    automaton: SuffixAutomaton
    told: int = 0


class NgramTries:
    """The automata of the running requests, by row, and what all requests wrote, if it is shared.

    Without sharing a trie is a function of its request's text alone. An automaton costs about 0.5 kB of host memory per
    token, and a few microseconds, a prompt's in its first cycle.
    """

    def __init__(self, depth: int, budget: int, shared: SharedTexts | None = None) -> None:
        self.depth, self.budget, self.shared = depth, budget, shared
        self._readers: dict[int, _Reader] = {}

    def forget(self, row: int) -> None:
        reader = self._readers.pop(row, None)
        if reader is not None:
            self._tell(reader, least=1)

    def is_certain(self, trie: Trie) -> bool:
        """Whether it leaves nothing to be gained from other guesses."""
        return trie.expected >= CERTAIN * min(self.depth, self.budget)

    def of(self, decode: Decode) -> Trie:
        """Guesses of what follows the request's text: `budget` nodes at most, none if it repeats nothing known."""
        reader = self._readers.get(decode.req_pool_index)
        # The list is the request's own and only grows; another one is another request's, whatever it holds.
        if reader is None or reader.text is not decode.text or len(decode.text) < reader.automaton.length:
            reader = self._readers[decode.req_pool_index] = _Reader(decode.text, SuffixAutomaton(self.depth))
        known = reader.automaton.length
        reader.automaton.extend(decode.text[known:])
        own = self._allowed(reader.automaton.continuations(self._wanted(decode)), decode)
        if self.shared is None:
            return own
        self._tell(reader, least=_PIECE)
        if self.is_certain(own):
            return own
        shared = self._allowed(self.shared.continuations(decode.text, self._wanted(decode)), decode)
        return blended(own, shared, self.budget)

    def _wanted(self, decode: Decode) -> int:
        """Nodes to ask for, where a grammar may refuse some."""
        return self.budget if decode.grammar_matcher is None else _SPARE * self.budget

    def _allowed(self, trie: Trie, decode: Decode) -> Trie:
        """The `budget` best nodes that the request's grammar allows, if it has one."""
        if decode.grammar_matcher is None:
            return trie
        return _followable(trie, decode.text, decode.grammar_matcher, self.budget)

    def _tell(self, reader: _Reader, least: int) -> None:
        """Share what is new of a text, if it is so much."""
        if self.shared is not None and len(reader.text) - reader.told >= least:
            start = max(reader.told - LONGEST, 0)
            self.shared.add(reader.text[start:], known=reader.told - start)
            reader.told = len(reader.text)


class NgramDrafter:
    """A trie per request, padded to as many nodes as one may have. A request without a match drafts nothing."""

    feeds = False

    def __init__(self, tries: NgramTries) -> None:
        self.tries = tries

    def forget(self, row: int) -> None:
        self.tries.forget(row)

    def prefill(self, prompts: Prompts) -> None:
        return None

    def extend(self, batch: DecodeBatch) -> None:
        return None

    def propose(self, draft: None, batch: DecodeBatch) -> TreeNodes:
        tries = [self.tries.of(decode) for decode in batch.decodes]
        numbers = upload(packed(tries, len(batch.seq_lens_host), self.tries.budget), batch.seq_lens.device)
        return TreeNodes(numbers[0], numbers[1], spec_steps=self.tries.depth)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        return None


def _followable(trie: Trie, text: Sequence[int], grammar_matcher: GrammarMatcher, budget: int) -> Trie:
    """The first `budget` nodes of a trie that may come after `text`."""
    kept = Trie([], [], [], trie.context)
    numbers = [0]  # of the trie's nodes, among the kept ones; -1: refused
    paths: list[tuple[int, ...]] = [()]  # of the kept ones
    for token, parent, estimate in zip(trie.tokens, trie.parents, trie.estimates, strict=True):
        above = numbers[parent]
        mask = grammar_matcher.mask(text, paths[above]) if above >= 0 and len(kept.tokens) < budget else None
        if mask is None or not allows(mask, token):
            numbers.append(-1)
            continue
        numbers.append(len(paths))
        paths.append((*paths[above], token))
        kept.tokens.append(token)
        kept.parents.append(above)
        kept.estimates.append(estimate)
    return kept


SCALE = 1 << 20  # estimates travel as integers, with the tokens


def packed(tries: Sequence[Trie], size: int, width: int) -> NDArray[np.int64]:
    """Tokens, parents and estimates times SCALE, int64 [3, size, width]; what no trie fills is token -1 of the root."""
    numbers = np.zeros((3, size, width), dtype=np.int64)
    numbers[0] = -1
    for row, trie in enumerate(tries):
        count = len(trie.tokens)
        numbers[0, row, :count] = trie.tokens
        numbers[1, row, :count] = trie.parents
        numbers[2, row, :count] = [round(estimate * SCALE) for estimate in trie.estimates]
    return numbers
