"""A model drafter and n-gram tries in one tree: equal paths joined, the nodes most likely to be accepted kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.draft_input import EagleDraftInput
from eagle_server.speculation.merge import ScoredNodes, best, unite
from eagle_server.speculation.tree import Candidates, EagleVerifyInput, TreeNodes
from eagle_server.worker.batch import DecodeBatch, Prompts
from eagle_server.worker.calibration import Calibration
from eagle_server.worker.drafters.eagle import EagleDrafter
from eagle_server.worker.drafters.ngram import SCALE, NgramTries, packed
from eagle_server.worker.graphs import Graphs

CERTAIN = 0.95  # of the tokens that a trie could give at most, so many are expected of it


class MixtureDrafter:
    """draft_token_num - 1 nodes of the model's candidates and the tries, by their calibrated chances of acceptance.

    The model is not asked where the tries of all requests are as good as certain: its forwards could not pay then.

    `depth` is the deeper of the two sources'. Joining is tensors only, and captured for the batch sizes in
    `graph_sizes`.
    """

    feeds = True

    def __init__(  # noqa: PLR0913
        self,
        model: EagleDrafter,
        *,
        trie_depth: int,
        draft_token_num: int,
        device: torch.device,
        graphs: Graphs | None = None,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        self.model, self.tries = model, NgramTries(trie_depth, draft_token_num - 1)
        self.attention = model.attention
        self.depth = max(model.num_steps, trie_depth)
        self.graphs, self.graph_sizes = graphs or Graphs(), frozenset(graph_sizes)
        self.calibration = Calibration(device)
        self._proposed: tuple[Tensor, Tensor] | None = None  # bins and priors of the nodes proposed last

    def forget(self, row: int) -> None:
        self.model.forget(row)
        self.tries.forget(row)

    def prefill(self, prompts: Prompts) -> None:
        self.model.prefill(prompts)

    def extend(self, batch: DecodeBatch) -> EagleDraftInput:
        return self.model.extend(batch)

    def propose(self, draft: EagleDraftInput, batch: DecodeBatch) -> TreeNodes:
        """The model's candidates and the tries, joined."""
        tries = [self.tries.of(decode) for decode in batch.decodes]
        size = len(batch.seq_lens_host)
        numbers = upload(packed(tries, size, self.tries.budget), batch.rows.device)
        fullest = min(self.tries.depth, self.tries.budget)
        if all(trie.expected >= CERTAIN * fullest for trie in tries):
            self._proposed = None
            return TreeNodes(numbers[0], numbers[1], spec_steps=self.depth)
        found = self.model.propose(draft, batch)
        assert found.scores is not None
        key = ("join", size) if size in self.graph_sizes else None
        inputs = (found.tokens, found.selected_index, found.parent_list, found.scores, numbers)
        tokens, parents, bins, priors = self.graphs.run(key, self._join, *inputs)
        self._proposed = (bins, priors)
        return TreeNodes(tokens, parents, spec_steps=self.depth)

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        """Learn from what was accepted, if both sources were asked; padding teaches nothing."""
        if self._proposed is None:
            return
        served = sum(bool(decode.text) for decode in batch.decodes)  # before the first request there is only warm-up
        self.calibration.observe(*self._proposed, tree, accepted, served)

    def _join(
        self, tokens: Tensor, selected_index: Tensor, parent_list: Tensor, scores: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens and parents of the tree, bins and priors of its nodes, each [bs, draft_token_num - 1]."""
        model = self.model
        found = Candidates(tokens, selected_index, parent_list, model.topk, model.num_steps, scores)
        trie = ScoredNodes(numbers[0], numbers[1], numbers[2].float() / SCALE)
        union = unite(ScoredNodes.of(found), trie, self.depth)
        chances, bins, priors = self.calibration.chances(union)
        nodes, order = best(union, chances, self.tries.budget, self.depth)
        return nodes.tokens, nodes.parents, bins.gather(1, order), priors.gather(1, order)
