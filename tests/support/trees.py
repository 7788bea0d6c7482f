"""Verify inputs of given trees, and walks along a tree's links in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from eagle_server.ops.tree import ancestors
from eagle_server.speculation.tree import EagleVerifyInput


def tree_input(
    parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], seq_lens: Sequence[int], spec_steps: int
) -> EagleVerifyInput:
    """The verify input of trees of one size, given by parents (-1 at node 0) and tokens."""
    links = torch.tensor(parents)
    mask, depths = ancestors(links, spec_steps)
    return EagleVerifyInput(
        draft_token=torch.tensor(tokens).view(-1),
        custom_mask=mask,
        positions=(torch.tensor(seq_lens)[:, None] + depths).view(-1),
        parents=links,
        depths=depths,
        spec_steps=spec_steps,
        topk=2,
        draft_token_num=links.shape[1],
    )


def pruned(tree: EagleVerifyInput, dropped: torch.Tensor) -> EagleVerifyInput:
    """The tree with the nodes `dropped`, bool [bs, D - 1], and all nodes below them as padding."""
    below = (tree.custom_mask[:, :, 1:] & dropped[:, None]).any(dim=2)
    return replace(tree, draft_token=tree.draft_token.masked_fill(below.view(-1), -1))


def children(tree: EagleVerifyInput, request: int, node: int) -> Iterator[int]:
    """The children of a node, along retrive_next_token and retrive_next_sibling."""
    child = int(tree.retrive_next_token[request, node])
    while child >= 0:
        yield child
        child = int(tree.retrive_next_sibling[request, child])


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Node numbers from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
