"""Candidate pools drafted from given scores, and the same trees in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.speculation.candidates import CandidatePool
from eagle_server.speculation.draft_input import DraftWindow, Frontier

ROOT = -1
CPU = torch.device("cpu")


@dataclass
class PoolNode:
    """One entry of a request's pool. `parent` is a pool index."""

    token: int
    score: float
    parent: int


def example_pool() -> tuple[CandidatePool, Frontier]:
    """The worked example of cycle.md: L = 4, K = 2, S = 3. Returns the last frontier: nodes 21 and 22."""
    pool = CandidatePool(torch.tensor([[11, 12]]), logs([[0.6, 0.3]]))
    first = Frontier.first(logs([[0.6, 0.3]]), torch.tensor([[11, 12]]), torch.zeros(2, 1), DraftWindow.of(2, 4, CPU))
    children = torch.tensor([[[21, 22], [23, 24]]])
    scores = first.topk_logp[:, :, None] + logs([[[0.6, 0.35], [0.5, 0.2]]])
    pool.add(children, scores)
    second, chosen = first.advance(children, scores, torch.zeros(2, 1))
    pool.expand(chosen)
    pool.add(torch.tensor([[[31, 32], [33, 34]]]), second.topk_logp[:, :, None] + logs([[[0.5, 0.3], [0.9, 0.05]]]))
    return pool, second


def logs(values: object) -> Tensor:
    return torch.tensor(values).log()


def draft(first: Tensor, steps: list[Tensor], tokens: list[Tensor]) -> tuple[CandidatePool, list[list[PoolNode]]]:
    """Draft as the worker does, from log-probabilities: [bs, K] first, then [bs, K, K] per step. Same for tokens."""
    bs, topk = first.shape
    pool = CandidatePool(tokens[0], first)
    frontier = Frontier.first(first, tokens[0], torch.zeros(bs * topk, 1), DraftWindow.of(topk, len(steps) * topk, CPU))
    nodes = [
        [PoolNode(t, s, ROOT) for t, s in zip(tokens[0][r].tolist(), first[r].tolist(), strict=True)] for r in range(bs)
    ]
    columns = [list(range(topk)) for _ in range(bs)]  # pool index of each frontier column
    for number, (logp, ids) in enumerate(zip(steps, tokens[1:], strict=True)):
        scores = frontier.topk_logp[:, :, None] + logp
        pool.add(ids, scores)
        for r in range(bs):
            for column, parent in enumerate(columns[r]):
                for rank in range(topk):
                    nodes[r].append(PoolNode(int(ids[r, column, rank]), float(scores[r, column, rank]), parent))
        if number < len(steps) - 1:
            frontier, chosen = frontier.advance(ids, scores, torch.zeros(bs * topk, 1))
            pool.expand(chosen)
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
