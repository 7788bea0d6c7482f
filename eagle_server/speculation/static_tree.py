"""Static trees for heads that draft level by level: which nodes each step feeds, and which of them see each other.

A tree is a list of choices as `medusa_choices` has them: (i, j) is the j-th best child of the i-th best child of the
root. Only nodes with children are fed to the head, so a node's slot in the draft's window is its place among those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.speculation.medusa import choice_parents, sorted_choices
from eagle_server.speculation.medusa_choices import Choices, parse_choices, ranks_of

__all__ = ["Level", "StaticTree", "parse_choices", "static_tree", "tree_attention_bias"]


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, and those of them that a draft step feeds."""

    picks: Tensor  # int64 [n], places in the flat [rows fed before, topk] children: row * topk + rank
    fed: Tensor  # int64 [rows], columns of this level that have children
    parents: Tensor  # int64 [rows], rows of the step before of which each fed node is a child
    sees: Tensor  # bool [rows, window], window slots of its fed ancestors and its own
    start: int  # the first window slot of this level


@dataclass(frozen=True)
class StaticTree:
    """A tree of n nodes without the root, numbered by depth and ranks; the same for all requests."""

    levels: tuple[Level, ...]
    parents: Tensor  # int64 [n], node numbers, the root is 0
    topk: int
    window: int  # window slots, one per node with children
    slot_depths: Tensor  # int64 [window], from 0

    @property
    def size(self) -> int:
        return len(self.parents)

    @property
    def rows(self) -> tuple[int, ...]:
        """How many nodes of a request each draft step feeds."""
        return tuple(len(level.fed) for level in self.levels[:-1])


def tree_attention_bias(choices: Choices | list[tuple[int, ...]]) -> Tensor:
    """float32 [n + 1, n + 1], root first, then by depth and ranks: 0 at ancestors and self, -inf elsewhere."""
    nodes = [(), *sorted_choices(choices)]
    sees = [[below[: len(above)] == above for above in nodes] for below in nodes]
    return torch.zeros(len(nodes), len(nodes)).masked_fill(~torch.tensor(sees), float("-inf"))


def static_tree(choices: Choices, device: torch.device) -> StaticTree:
    """The tensors of a tree whose every node's parent is in it too (see `medusa_choices.checked`)."""
    nodes, topk = sorted_choices(choices), ranks_of(choices)
    inner = {node[:-1] for node in nodes}
    fed = [node for node in nodes if node in inner]
    visible = tree_attention_bias(choices)[1:, 1:] == 0
    slots = [nodes.index(node) for node in fed]
    sees = visible[slots][:, slots].to(device)
    levels, start = list[Level](), 0
    before: list[tuple[int, ...]] = [()]  # the root is the row that extend fed
    for depth in range(1, max(map(len, nodes)) + 1):
        here = [node for node in nodes if len(node) == depth]
        rows = [node for node in here if node in inner]
        levels.append(
            Level(
                picks=_ints([before.index(node[:-1]) * topk + node[-1] for node in here], device),
                fed=_ints([here.index(node) for node in rows], device),
                parents=_ints([before.index(node[:-1]) for node in rows], device),
                sees=sees[start : start + len(rows)],
                start=start,
            )
        )
        before, start = rows, start + len(rows)
    depths = _ints([len(node) - 1 for node in fed], device)
    return StaticTree(tuple(levels), _ints(choice_parents(choices), device), topk, len(fed), depths)


def _ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
