"""Grammars while trees grow: of the tokens that a drafter would guess after a node, only those that may stand there.

What may come first is known when a cycle begins. What may come after a drafted node is known when that node is, so each
further level of a tree is waited for; only in batches with grammars, and those run the draft without CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.topk import topk_logprobs
from eagle_server.ops.upload import upload
from eagle_server.plan import Decode
from eagle_server.speculation.transforms import allowed_by
from eagle_server.worker.host import HostCopy

_OFF = float("-inf")
Path = tuple[int, ...]
Ids = Callable[[Tensor], Tensor]  # from a draft's vocabulary to the target's, int64 of any shape


class DraftTokenMask(Protocol):
    """Stands after the nodes of one level of every request's tree, the root at first, and says what may follow them."""

    @property
    def is_active(self) -> bool:
        """Whether it forbids anything. If so, it waits for the device, and no graph may be captured with it."""
        ...

    def best(self, logits: Tensor, k: int, ids: Ids | None = None) -> tuple[Tensor, Tensor]:
        """The k best children of each node of the level, given logits [bs * nodes, draft vocabulary].

        Log-probabilities, float32 [bs * nodes, k], among what may follow, and target ids, int64. A child that may not
        has -inf, and so have all children of a node that may not stand where it does.
        """
        ...

    def advance(self, tokens: Tensor, chosen: Tensor | None = None, fan_out: int = 1) -> DraftTokenMask:
        """To the next level: its tokens int64 [bs, nodes], and their parents' columns times fan_out, plus anything
        below fan_out (None: there is one parent)."""
        ...

    def without_refused(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Drafted tokens with padding, -1, where the score is that of a token that may not stand there."""
        ...


class NoTokenMask:
    """No request has a grammar: everything may follow, at no cost."""

    is_active = False

    def best(self, logits: Tensor, k: int, ids: Ids | None = None) -> tuple[Tensor, Tensor]:
        logp, found = topk_logprobs(logits, k)
        return logp, found if ids is None else ids(found)

    def advance(self, tokens: Tensor, chosen: Tensor | None = None, fan_out: int = 1) -> DraftTokenMask:
        return self

    def without_refused(self, tokens: Tensor, scores: Tensor) -> Tensor:
        return tokens


NO_TOKEN_MASK = NoTokenMask()


@dataclass(frozen=True)
class GrammarTokenMask:
    """Of the requests with grammars: their numbers in the batch, their turns, and the paths to the level's nodes."""

    requests: tuple[int, ...]
    turns: tuple[Decode, ...]
    paths: tuple[tuple[Path, ...], ...]  # by request, equally many
    is_active = True

    def best(self, logits: Tensor, k: int, ids: Ids | None = None) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(logits.shape[1], device=logits.device)
        tokens = tokens if ids is None else ids(tokens)
        bits = upload(np.stack([self._masks(number) for number in range(len(self.turns))]), logits.device, torch.int32)
        masked = logits.unflatten(0, (-1, len(self.paths[0]))).clone()
        for request, rows in zip(self.requests, bits, strict=True):
            masked[request].masked_fill_(~allowed_by(rows, tokens), _OFF)
        logp, found = topk_logprobs(masked.flatten(0, 1), k)
        logp = logp.nan_to_num(nan=_OFF, neginf=_OFF)  # where nothing may follow
        return logp, tokens.index_select(0, found.view(-1)).view_as(found)

    def advance(self, tokens: Tensor, chosen: Tensor | None = None, fan_out: int = 1) -> DraftTokenMask:
        found, places = HostCopy(tokens, torch.zeros_like(tokens) if chosen is None else chosen).lists()
        return replace(
            self,
            paths=tuple(
                tuple((*paths[place // fan_out], token) for token, place in zip(found[n], places[n], strict=True))
                for n, paths in zip(self.requests, self.paths, strict=True)
            ),
        )

    def without_refused(self, tokens: Tensor, scores: Tensor) -> Tensor:
        return tokens.masked_fill(scores.isneginf(), -1)

    def _masks(self, number: int) -> NDArray[np.int32]:
        """Bits of int32 [nodes, words]; none after what may not stand."""
        turn = self.turns[number]
        assert turn.grammar_matcher is not None
        found = [turn.grammar_matcher.mask(turn.text, path) for path in self.paths[number]]
        nothing = np.zeros(turn.grammar_matcher.words, dtype=np.int32)
        return np.stack([nothing if mask is None else mask for mask in found])


def draft_token_mask(decodes: Sequence[Decode]) -> DraftTokenMask:
    """Where the trees of a cycle begin."""
    chosen = [(n, turn) for n, turn in enumerate(decodes) if turn.grammar_matcher is not None and turn.speculative]
    if not chosen:
        return NO_TOKEN_MASK
    requests, turns = zip(*chosen, strict=True)
    return GrammarTokenMask(requests, turns, (((),),) * len(turns))
