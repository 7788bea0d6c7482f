"""A model drafter and n-gram tries in one tree: equal paths are joined, and the nodes most likely accepted are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Generic

from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.plan import TreeShape
from eagle_server.speculation.merge import best, chances, join_trees
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.drafters.interface import Drafter, DrafterSetup, State
from eagle_server.worker.drafters.ngram.drafter import NgramTries, packed, trie_tree


class MixtureDrafter(Generic[State]):
    """Joins a model's tree and the tries, and keeps the nodes with the highest estimated chance of acceptance.

    The model is not run while the tries of all requests are almost certain: its forwards could not pay then. `steps` is
    the larger number of the two. Joining uses tensors only, and is captured.
    """

    uses_features, extends_ahead, proposes_ahead, reads_late = True, False, False, False

    def __init__(self, model: Drafter[State], tries: NgramTries, setup: DrafterSetup) -> None:
        self.model, self.tries = model, tries
        self.steps, self.widest = max(model.steps, tries.steps), model.widest
        self.graphs, self.graph_sizes = setup.graphs, frozenset(setup.graph_sizes)

    def forget(self, req_pool_index: int) -> None:
        self.model.forget(req_pool_index)
        self.tries.forget(req_pool_index)

    def prefill(self, prompts: Prompts) -> None:
        self.model.prefill(prompts)
        self.tries.read_prompts(prompts.chunks)

    def extend(self, batch: DecodeBatch) -> State:
        return self.model.extend(batch)

    def propose(self, draft: State, batch: DecodeBatch) -> Tree:
        """The model's candidates and the tries, joined."""
        self.tries.read(batch.decodes)
        tries = [self.tries.trie_of(decode) for decode in batch.decodes]
        size = len(batch.seq_lens_host)
        numbers = upload(packed(tries, size, self.tries.drafts), batch.seq_lens.device)
        if all(map(self.tries.is_certain, tries)):
            return trie_tree(batch.verified_id, batch.seq_lens, numbers, self.steps)
        steps = min(batch.steps, self.model.steps)
        # What is worth its time follows from both sources, so nothing is cut before they are joined.
        tree = self.model.propose(draft, replace(batch, steps=steps, least_logp=-math.inf))
        key = ("join", size) if size in self.graph_sizes else None
        return self.graphs.run(key, self._join, tree, numbers)

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        return self.model.forwards(shape._replace(steps=min(shape.steps, self.model.steps)))

    def _join(self, tree: Tree, numbers: Tensor) -> Tree:
        """The best nodes of both. `numbers`: the tries', packed."""
        tries = trie_tree(tree.tokens[:, 0], tree.start, numbers, self.steps)
        union, estimates = join_trees(tree, tries, self.steps)
        return best(union, chances(estimates), self.tries.drafts)
