"""The candidate pool of one multi-step draft: all scored children, and the selection of the best."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.candidates import best_candidates
from eagle_server.speculation.tree import Candidates


class CandidatePool:
    """Collects topk first-level nodes and topk * topk children per draft step. `best` re-ranks all of them.

    Pool indices: level 1 has 0..topk-1. Step i adds the child of column f and rank c at topk + i*topk^2 + f*topk + c.
    """

    def __init__(self, tokens: Tensor, scores: Tensor, guesses: Tensor | None = None) -> None:
        """The first level, [bs, topk]. Scores are log chances of paths, guesses the drafter's own of the last step.

        Without guesses the scores are not corrected ones, and no level has any.
        """
        bs, self.topk = tokens.shape
        self.levels = 1
        self._tokens, self._scores = [tokens], [scores]
        self._guesses = [] if guesses is None else [guesses]
        first = torch.arange(-1, self.topk, device=tokens.device).expand(bs, -1)
        self._parents = [first]

    def add(self, tokens: Tensor, scores: Tensor, guesses: Tensor | None = None) -> None:
        """Add the children [bs, topk, topk] of the current frontier."""
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores.flatten(1))
        if guesses is not None:
            self._guesses.append(guesses.flatten(1))
        self.levels += 1

    def expand(self, chosen: Tensor) -> None:
        """Set the frontier to `chosen` [bs, topk], flat indices into the children added last."""
        self._parents.append(chosen + self.topk + (self.levels - 2) * self.topk**2)

    def best(self, count: int) -> Candidates:
        """The `count` candidates with the best cumulative scores, or all if there are fewer, in ascending pool order.

        A child never scores above its parent, and ties go to the lower index. So the set is closed under ancestors, and
        parents come before children.
        """
        tokens, scores = torch.cat(self._tokens, dim=1), torch.cat(self._scores, dim=1)
        guesses = torch.cat(self._guesses, dim=1) if self._guesses else None
        best = best_candidates(scores, tokens, guesses, min(count, scores.shape[1]))
        # Groups: one for the root, then one per frontier column of every expanded level.
        width = self.topk * (self.levels - 1) + 1
        return Candidates(
            tokens=best.tokens,
            selected_index=best.selected,
            parent_list=torch.cat(self._parents, dim=1)[:, :width],
            topk=self.topk,
            spec_steps=self.levels,
            scores=best.scores,
            guesses=best.guesses,
        )
