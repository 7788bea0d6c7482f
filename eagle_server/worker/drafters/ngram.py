"""N-gram drafting: no model, but what followed the end of a request's text where it occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_server.ops.upload import upload
from eagle_server.plan import Decode
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.suffix_automaton import SuffixAutomaton, Trie
from eagle_server.speculation.tree import EagleVerifyInput, TreeNodes
from eagle_server.worker.batch import DecodeBatch, Prompts


@dataclass(frozen=True)
class _Reader:
    """A request's automaton, and the list of tokens that it reads as that grows."""

    text: Sequence[int]
    automaton: SuffixAutomaton


class NgramTries:
    """The automata of the running requests, by row. A trie is a function of its request's text alone.

    An automaton costs about 0.5 kB of host memory per token, and a few microseconds, a prompt's in its first cycle.
    """

    def __init__(self, depth: int, budget: int) -> None:
        self.depth, self.budget = depth, budget
        self._readers: dict[int, _Reader] = {}

    def forget(self, row: int) -> None:
        self._readers.pop(row, None)

    def of(self, decode: Decode) -> Trie:
        """Guesses of what follows the request's text: `budget` nodes at most, none if nothing in it repeats."""
        reader = self._readers.get(decode.row)
        # The list is the request's own and only grows; another one is another request's, whatever it holds.
        if reader is None or reader.text is not decode.text or len(decode.text) < reader.automaton.length:
            reader = self._readers[decode.row] = _Reader(decode.text, SuffixAutomaton(self.depth))
        known = reader.automaton.length
        reader.automaton.extend(decode.text[known:])
        return reader.automaton.continuations(self.budget)


class NgramDrafter:
    """A trie per request, padded to draft_token_num - 1 nodes. A request without a match drafts nothing."""

    feeds = False

    def __init__(self, *, num_steps: int, draft_token_num: int) -> None:
        self.tries = NgramTries(num_steps, draft_token_num - 1)

    def forget(self, row: int) -> None:
        self.tries.forget(row)

    def prefill(self, prompts: Prompts) -> None:
        return None

    def extend(self, batch: DecodeBatch) -> None:
        return None

    def propose(self, draft: None, batch: DecodeBatch) -> TreeNodes:
        tries = [self.tries.of(decode) for decode in batch.decodes]
        numbers = upload(packed(tries, len(batch.seq_lens_host), self.tries.budget), batch.rows.device)
        return TreeNodes(numbers[0], numbers[1], spec_steps=self.tries.depth)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        return None


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
