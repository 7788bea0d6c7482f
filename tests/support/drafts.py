"""Candidate pools drafted from given scores, and the same trees in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.attention.spec_info import DraftWindow, EagleDraftInput
from eagle_server.ops.tree.candidates import CandidatePool, Children
from eagle_server.speculation.candidates import organize_draft_results
from eagle_server.speculation.tree import Tree

ROOT = -1
CPU = torch.device("cpu")


@dataclass
class PoolNode:
    """One entry of a request's pool. `parent` is a pool index."""

    token: int
    score: float
    parent: int


@dataclass
class Pool:
    """What a draft has scored and expanded. `tree` selects from it."""

    levels: list[Children]
    chosen: list[Tensor]

    def to(self, device: torch.device) -> Pool:
        levels = [Children(*(part.to(device) for part in level)) for level in self.levels]
        return Pool(levels, [chosen.to(device) for chosen in self.chosen])

    @property
    def candidates(self) -> CandidatePool:
        return CandidatePool.of(self.levels, self.chosen)

    def tree(self, count: int, verified_id: int = 77, seq_lens: Tensor | None = None) -> Tree:
        """The tree of the `count` best candidates."""
        first = self.levels[0].tokens
        roots = torch.full_like(first[:, 0], verified_id)
        lens = torch.zeros_like(roots) if seq_lens is None else seq_lens
        return organize_draft_results(roots, lens, self.candidates, count + 1)


def scored(tokens: Tensor, scores: Tensor) -> Children:
    return Children(tokens, scores, scores)


def example_pool(requests: int = 1) -> tuple[Pool, EagleDraftInput]:
    """The worked example of cycle.md, K = 2 and S = 3, for equal requests. Returns the last step: nodes 21 and 22."""
    tokens, chances = torch.tensor([[11, 12]] * requests), logs([[0.6, 0.3]] * requests)
    first = EagleDraftInput.first(chances, tokens, torch.zeros(2 * requests, 1), DraftWindow.of(2, 4, CPU))
    children = torch.tensor([[[21, 22], [23, 24]]] * requests)
    scores = first.topk_logp[:, :, None] + logs([[[0.6, 0.35], [0.5, 0.2]]])
    second, chosen = first.advance(children, scores, torch.zeros(2 * requests, 1))
    last = second.topk_logp[:, :, None] + logs([[[0.5, 0.3], [0.9, 0.05]]])
    leaves = torch.tensor([[[31, 32], [33, 34]]] * requests)
    return Pool([scored(tokens, chances), scored(children, scores), scored(leaves, last)], [chosen]), second


def logs(values: object) -> Tensor:
    return torch.tensor(values).log()


def draft(first: Tensor, steps: list[Tensor], tokens: list[Tensor]) -> tuple[Pool, list[list[PoolNode]]]:
    """Draft as the worker does, from log-probabilities: [bs, K] first, then [bs, K, K] per step. Same for tokens."""
    bs, topk = first.shape
    pool, window = Pool([scored(tokens[0], first)], []), DraftWindow.of(topk, len(steps) * topk, CPU)
    frontier = EagleDraftInput.first(first, tokens[0], torch.zeros(bs * topk, 1), window)
    nodes = [
        [PoolNode(t, s, ROOT) for t, s in zip(tokens[0][r].tolist(), first[r].tolist(), strict=True)] for r in range(bs)
    ]
    columns = [list(range(topk)) for _ in range(bs)]  # pool index of each frontier column
    for number, (logp, ids) in enumerate(zip(steps, tokens[1:], strict=True)):
        scores = frontier.topk_logp[:, :, None] + logp
        pool.levels.append(scored(ids, scores))
        for r in range(bs):
            for column, parent in enumerate(columns[r]):
                for rank in range(topk):
                    nodes[r].append(PoolNode(int(ids[r, column, rank]), float(scores[r, column, rank]), parent))
        if number < len(steps) - 1:
            frontier, chosen = frontier.advance(ids, scores, torch.zeros(bs * topk, 1))
            pool.chosen.append(chosen)
            level = len(nodes[0]) - topk**2
            columns = [[level + index for index in chosen[r].tolist()] for r in range(bs)]
    return pool, nodes


def best(nodes: list[PoolNode], count: int) -> list[int]:
    """Pool indices of the `count` best scores, in ascending order. Ties go to the lower index. NaN is the worst."""
    worth = [-math.inf if math.isnan(node.score) else node.score for node in nodes]
    return sorted(sorted(range(len(nodes)), key=lambda i: (-worth[i], i))[:count])


def pool_lineage(nodes: list[PoolNode], index: int) -> list[int]:
    """Pool indices from level 1 down to `index`."""
    path = [index]
    while nodes[path[0]].parent != ROOT:
        path.insert(0, nodes[path[0]].parent)
    return path
