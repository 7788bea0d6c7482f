"""What a cycle drafted and what became of it, as plain values: written down by a drafter that wraps another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import EagleVerifyInput, Proposal
from eagle_server.worker.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.interface import Drafter

PADDING = -1


@dataclass(frozen=True)
class DraftedTree:
    """One request's tree of one cycle, without padding. Node 0 is the root; parents come before children.

    `emitted` are the tokens of the nodes of `path` after the root, and the bonus. A request that ends within them
    (stop, max_tokens) sends fewer.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # node numbers, -1 for the root
    scores: tuple[float | None, ...]  # log-probability of the path, where the drafter gives one; 0 for the root
    path: tuple[int, ...]  # the accepted nodes, the root first
    emitted: tuple[int, ...]

    @property
    def bonus(self) -> int:
        """The target's token after the last accepted node."""
        return self.emitted[-1]

    def children(self) -> list[list[int]]:
        """Node numbers of every node's children, the drafter's favourite first."""
        below: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                below[parent].append(node)
        return [sorted(nodes, key=self._preference) for nodes in below]

    def chance(self, node: int) -> float | None:
        """The drafter's probability of a node given its parent, None where it says none."""
        if node == 0:
            return None
        own, above = self.scores[node], self.scores[self.parents[node]]
        if own is None or above is None:
            return None
        return math.exp(min(own - above, 0.0)) if math.isfinite(own) else 0.0

    def _preference(self, node: int) -> tuple[float, int]:
        score = self.scores[node]
        return (0.0 if score is None else -score, node)


class RecordingDrafter:
    """A `Drafter` that does what `drafter` does, and hands the trees of every cycle to `record`, request by request.

    The copies to the host cost a wait for the device in every cycle: this is for looking, not for serving.
    """

    def __init__(self, drafter: Drafter[Any], record: Callable[[list[DraftedTree]], None]) -> None:
        self.drafter, self.feeds = drafter, drafter.feeds
        self._record = record
        self._proposal: Proposal | None = None

    def forget(self, row: int) -> None:
        self.drafter.forget(row)

    def prefill(self, prompts: Prompts) -> None:
        self.drafter.prefill(prompts)

    def extend(self, batch: DecodeBatch) -> Any:
        return self.drafter.extend(batch)

    def propose(self, draft: Any, batch: DecodeBatch) -> Proposal:
        self._proposal = self.drafter.propose(draft, batch)
        return self._proposal

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        self.drafter.observe(batch, tree, accepted)
        assert self._proposal is not None, "observed before anything was proposed"
        self._record(drafted_trees(self._proposal, tree, accepted, len(batch.decodes)))


def drafted_trees(proposal: Proposal, tree: EagleVerifyInput, accepted: Accepted, requests: int) -> list[DraftedTree]:
    """The trees of the first `requests` of a batch; what follows them is padding."""
    size = tree.draft_token_num
    tokens = tree.draft_token.view(-1, size)[:requests].tolist()
    parents = tree.parents[:requests].tolist()
    given = proposal.scores
    scores: list[list[float | None]] = [[0.0, *[None] * (size - 1)] for _ in range(requests)]
    if given is not None and size > 1:
        scores = [[0.0, *row] for row in given[:requests].tolist()]
    paths, emitted = accepted.path[:requests].tolist(), accepted.tokens[:requests].tolist()
    return [_without_padding(*row) for row in zip(tokens, parents, scores, paths, emitted, strict=True)]


def _without_padding(
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float | None],
    path: Sequence[int],
    emitted: Sequence[int],
) -> DraftedTree:
    kept = [node for node, token in enumerate(tokens) if token != PADDING]
    number = {PADDING: PADDING, **{node: place for place, node in enumerate(kept)}}
    walked = [number[node] for node in path if node >= 0]
    return DraftedTree(
        tokens=tuple(tokens[node] for node in kept),
        parents=tuple(number[parents[node]] for node in kept),
        scores=tuple(scores[node] for node in kept),
        path=tuple(walked),
        emitted=tuple(emitted[: len(walked)]),
    )
