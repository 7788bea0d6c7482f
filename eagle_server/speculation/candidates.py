"""The candidates of a multi-step draft: all scored children. The best of them become the tree (EAGLE-2)."""

from __future__ import annotations

from torch import Tensor

from eagle_server.ops.tree.build import select_nodes
from eagle_server.ops.tree.candidates import CandidatePool
from eagle_server.speculation.tree import Tree


def organize_draft_results(verified_id: Tensor, seq_lens: Tensor, pool: CandidatePool, nodes: int) -> Tree:
    """The tree of the `nodes` - 1 candidates with the best scores, or of all if there are fewer.

    verified_id, seq_lens: int64 [bs], the roots and their positions.
    """
    found = select_nodes(verified_id, seq_lens, pool, min(nodes - 1, pool.size))
    tree = (found.tokens, found.parents, found.depths, found.mask, found.positions)
    return Tree(*tree, pool.steps + 1, pool.topk, found.scores, found.guesses)
