"""Given trees, and walks along a tree's links in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from eagle_server.attention.spec_info import retrive_links
from eagle_server.speculation.tree import Tree


def tree_of(
    parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], seq_lens: Sequence[int], steps: int
) -> Tree:
    """Trees of one size, given by parents (-1 at node 0) and tokens."""
    return Tree.linked(torch.tensor(tokens), torch.tensor(parents), torch.tensor(seq_lens), steps, topk=2)


def pruned(tree: Tree, dropped: torch.Tensor) -> Tree:
    """The tree with the nodes `dropped`, bool [bs, D - 1], and all nodes below them as padding."""
    below = (tree.mask[:, :, 1:] & dropped[:, None]).any(dim=2)
    return replace(tree, tokens=tree.tokens.masked_fill(below, -1))


def children(tree: Tree, request: int, node: int) -> Iterator[int]:
    """The children of a node, along retrive_next_token and retrive_next_sibling."""
    next_token, next_sibling = (links[request].tolist() for links in retrive_links(tree.parents))
    child = next_token[node]
    while child >= 0:
        yield child
        child = next_sibling[child]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Node numbers from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
