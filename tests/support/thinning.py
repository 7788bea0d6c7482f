"""A drafter whose trees differ in size from request to request and from cycle to cycle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle_server.engine.engine import Engine
from eagle_server.models.targets.interface import TargetOutput
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree import Tree, without
from eagle_server.worker.batch.batch import DecodeBatch, PromptBatch, Prompts
from eagle_server.worker.cycle import Cycle
from eagle_server.worker.drafters.interface import Drafter


class ThinningDrafter:
    """A `Drafter` that turns random nodes of another one's proposals into padding, with all nodes below them.

    Some cycles keep all nodes, and some keep only the roots. `nodes` counts the nodes of every cycle that are left to
    verify, roots included, and `sizes` has those of the largest tree, after and before thinning.
    """

    def __init__(self, drafter: Drafter[Any], seed: int = 0) -> None:
        self.drafter, self.uses_features = drafter, drafter.uses_features
        self.reads_late, self.proposes_ahead = drafter.reads_late, False  # it counts the trees
        self.steps, self.widest = drafter.steps, drafter.widest
        self.nodes: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self._generator = torch.Generator().manual_seed(seed)

    def forget(self, req_pool_index: int) -> None:
        self.drafter.forget(req_pool_index)

    def prefill(self, prompts: Prompts) -> None:
        self.drafter.prefill(prompts)

    def extend(self, batch: DecodeBatch) -> Any:
        return self.drafter.extend(batch)

    def propose(self, draft: Any, batch: DecodeBatch) -> Tree:
        tree = self.drafter.propose(draft, batch)
        dropped = self._random(len(tree.tokens), tree.size - 1) < self._share_dropped(len(tree.tokens))
        thin = without(tree, (tree.mask[:, 1:, 1:] & dropped[:, None]).any(dim=2))
        counts, before = ((each.tokens >= 0).sum(1) for each in (thin, tree))
        self.sizes.append((int(counts.max()), int(before.max())))
        return thin

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        return self.drafter.forwards(shape)

    def _random(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self._generator)

    def _share_dropped(self, requests: int) -> Tensor:
        """The chance that a node is dropped, [requests, 1]: 0 or 1 for all every sixth cycle, else random for each."""
        in_turn = {0: 1.0, 2: 0.0}.get(len(self.sizes) % 6)
        if in_turn is not None:
            return torch.full((requests, 1), in_turn)
        return 1.2 * self._random(requests, 1) - 0.1


def thinned(engine: Engine, seed: int = 0) -> Engine:
    """The same engine with thinned trees."""
    drafting, draft = engine.worker.drafting, engine.worker.drafting.draft
    drafting.drafter = drafter = ThinningDrafter(drafting.drafter, seed)

    def watched(cycle: Cycle) -> None:
        draft(cycle)
        drafter.nodes.append(int((cycle.tree.tokens >= 0).sum()))

    drafting.draft = watched  # type: ignore[method-assign]
    return engine


class VerifiedRows:
    """A `Target` that counts the rows of the verify forwards of an engine, and the rows of their logits.

    `mixed` counts the forwards that had prompts as well. Their rows are not counted.
    """

    def __init__(self, engine: Engine) -> None:
        self.rows: list[int] = []
        self.logit_rows: list[int] = []
        self.mixed = 0
        self._target, self._verifies = engine.worker.verifier.target, False
        verifier = engine.worker.verifier

        def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*given: Any) -> Any:
                self._verifies = True
                try:
                    return forward(*given)
                finally:
                    self._verifies = False

            return counted

        verify_and_prefill = watched(verifier.mixed)

        def mixed(batch: DecodeBatch, tree: Tree, prompts: PromptBatch, *given: Any) -> Any:
            verified, prefilled = verify_and_prefill(batch, tree, prompts, *given)
            self.mixed += 1
            self.rows[-1] -= sum(prompts.counts) + prefilled.padding
            self.logit_rows[-1] -= len(prefilled.logits)
            return verified, prefilled

        verifier.verify, verifier.mixed = watched(verifier.verify), mixed  # type: ignore[method-assign]
        verifier.target = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, tokens: Tensor, *given: Any) -> TargetOutput:
        if self._verifies:
            self.rows.append(len(tokens))
        return self._target(tokens, *given)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self._verifies:
            self.logit_rows.append(len(hidden))
        return self._target.logits(hidden, out)
