"""A model drafter and n-gram tries in one tree: equal paths union, the nodes most likely to be accepted kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.merge import ScoredNodes, best, join_trees
from eagle_server.speculation.tree import EagleVerifyInput, Proposal, TreeNodes
from eagle_server.worker.batch import DecodeBatch, Prompts
from eagle_server.worker.calibration import Calibration
from eagle_server.worker.drafters.interface import ModelDrafter, State
from eagle_server.worker.drafters.ngram.drafter import SCALE, NgramTries, packed
from eagle_server.worker.graphs import Graphs


class MixtureDrafter(Generic[State]):
    """As many nodes as the tries may have, of theirs and the model's, by their calibrated chances of acceptance.

    The model is not asked where the tries of all requests are as good as certain: its forwards could not pay then.

    `depth` is the deeper of the two sources'. Joining is tensors only, and captured for the batch sizes in
    `graph_sizes`.
    """

    feeds = True

    def __init__(  # noqa: PLR0913
        self,
        model: ModelDrafter[State],
        tries: NgramTries,
        *,
        device: torch.device,
        graphs: Graphs | None = None,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        self.model, self.tries = model, tries
        self.depth = max(model.num_steps, tries.depth)
        self.graphs, self.graph_sizes = graphs or Graphs(), frozenset(graph_sizes)
        self.calibration = Calibration(device)
        self._proposed: tuple[Tensor, Tensor] | None = None  # bins and priors of the nodes proposed last

    def forget(self, row: int) -> None:
        self.model.forget(row)
        self.tries.forget(row)

    def prefill(self, prompts: Prompts) -> None:
        self.model.prefill(prompts)

    def extend(self, batch: DecodeBatch) -> State:
        return self.model.extend(batch)

    def propose(self, draft: State, batch: DecodeBatch) -> TreeNodes:
        """The model's candidates and the tries, union."""
        tries = [self.tries.of(decode) for decode in batch.decodes]
        size = len(batch.seq_lens_host)
        numbers = upload(packed(tries, size, self.tries.budget), batch.seq_lens.device)
        if all(map(self.tries.is_certain, tries)):
            self._proposed = None
            return TreeNodes(numbers[0], numbers[1], spec_steps=self.depth)
        found = self.model.propose(draft, batch)
        key, tensors = ("join", size) if size in self.graph_sizes else None, _tensors(found)
        function = partial(self._join, found, tuple(tensors))
        tokens, parents, bins, priors = self.graphs.run(key, function, *tensors.values(), numbers)
        self._proposed = (bins, priors)
        return TreeNodes(tokens, parents, spec_steps=self.depth)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        """Learn from what was accepted, if both sources were asked; padding teaches nothing."""
        if self._proposed is None:
            return
        served = sum(bool(decode.text) for decode in batch.decodes)  # before the first request there is only warm-up
        self.calibration.observe(*self._proposed, tree, accepted, served)

    def _join(self, kind: Proposal, names: Sequence[str], *captured: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens and parents of the tree, bins and priors of its nodes, each [bs, budget].

        `captured` are the tensors of a proposal of this kind, by `names`, and the tries' numbers.
        """
        *proposed, numbers = captured
        named: dict[str, Any] = dict(zip(names, proposed, strict=True))
        found = replace(kind, **named)
        trie = ScoredNodes(numbers[0], numbers[1], numbers[2].float() / SCALE)
        union = join_trees(ScoredNodes.of(found), trie, self.depth)
        chances, bins, priors = self.calibration.chances(union)
        nodes, order = best(union, chances, self.tries.budget, self.depth)
        return nodes.tokens, nodes.parents, bins.gather(1, order), priors.gather(1, order)


def _tensors(proposal: Proposal) -> dict[str, Tensor]:
    """What differs between proposals of one kind and shape, by the names of their fields."""
    values = {each.name: getattr(proposal, each.name) for each in fields(proposal)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
