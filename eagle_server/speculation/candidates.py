"""The candidates of a multi-step draft: all scored children. The best of them become the tree (EAGLE-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.tree.candidates import best_candidates
from eagle_server.speculation.tree import Tree, selected_tree


class Children(NamedTuple):
    """The children that one draft step has scored: of the root [bs, K], then of K nodes [bs, K, K]."""

    tokens: Tensor  # int64
    scores: Tensor  # float32, log chances of paths
    guesses: Tensor  # float32, the drafter's own log chances of the last step


def organize_draft_results(
    verified_id: Tensor, seq_lens: Tensor, levels: Sequence[Children], chosen: Sequence[Tensor], nodes: int
) -> Tree:
    """The tree of the `nodes` - 1 candidates with the best scores, or of all if there are fewer.

    A child never scores above its parent, and ties go to the lower index. So the best are closed under ancestors, and
    parents come before children.

    Args:
        verified_id, seq_lens: int64 [bs], the roots and their positions.
        chosen: int64 [bs, K] for every level that was expanded after the first: its nodes, as flat indices into the
            K * K children that were scored last.

    Candidates are numbered by level: the first has 0..K-1, the child of node f and rank c in step i has number
    K + i * K^2 + f * K + c.
    """
    topk = levels[0].tokens.shape[1]
    tokens, scores, guesses = (torch.cat([part.flatten(1) for part in parts], 1) for parts in zip(*levels, strict=True))
    best = best_candidates(scores, tokens, guesses, min(nodes - 1, scores.shape[1]))
    # The parent of each K siblings: the root, the first level's nodes, then the nodes that later steps expanded.
    first = torch.arange(-1, topk if len(levels) > 1 else 0, device=tokens.device).expand(len(tokens), -1)
    later = [fed + topk + step * topk**2 for step, fed in enumerate(chosen)]
    return selected_tree(verified_id, seq_lens, best, torch.cat([first, *later], dim=1), topk, len(levels))
