"""A drafted node attends only to the prefix and its ancestors: drafting each path alone gives the same logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.attention.spec_info import EagleDraftInput
from eagle_server.engine.engine import Engine
from eagle_server.models.drafts.interface import DraftHead, DraftOutput
from eagle_server.plan import CyclePlan, CycleResult
from tests.lossless.conftest import eagle_is_deep
from tests.lossless.pairs import Pair
from tests.support.dense import Recording, extend, features_of, follow_path
from tests.support.engines import request, run, speculative
from tests.support.wrapped_head import WrappedHead

TOLERANCE = 1e-4
STEPS, TOPK = 4, 3


@dataclass
class Call:
    """One pass of the head."""

    tokens: Tensor  # [rows]
    hidden: Tensor  # [rows, H]
    out: DraftOutput


class SpyHead(WrappedHead):
    """Records its passes. Each run begins with `combine`: a draft-extend or a prefill."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.runs: list[list[Call]] = []

    def combine(self, features: Tensor) -> Tensor:
        self.runs.append([])
        return super().combine(features)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: object) -> DraftOutput:
        out = super().forward(tokens, hidden, positions, attention)
        self.runs[-1].append(Call(tokens, hidden, out))
        return out


@dataclass
class Drafted:
    """One request's draft tree after `text`. The last token of `text` is the root."""

    text: list[int]
    nodes: list[tuple[list[int], Tensor]]  # (path, the head's normed output)
    moved: int  # nodes in a different column than their parent


def drafted_trees(engine: Engine, spy: SpyHead) -> list[Drafted]:
    """A list that receives every tree the engine drafts from now on."""
    trees: list[Drafted] = []
    worker, original = engine.worker, engine.worker.run

    def watched(plan: CyclePlan, *args: Any) -> CycleResult:
        texts = {each.req_pool_index: list(each.tokens) for each in engine.scheduler.running}
        spy.runs.clear()
        result = original(plan, *args)
        if any(each.tokens_left <= STEPS for each in plan.decodes):
            return result  # the trees at the end of a text are smaller
        steps = spy.runs[-1][1:] if plan.decodes else []  # before, it reads prompts
        assert len(steps) == (STEPS - 1 if plan.decodes else 0)
        trees.extend(tree_of(texts[d.req_pool_index], r, steps) for r, d in enumerate(plan.decodes))
        return result

    worker.run = watched  # type: ignore[method-assign]
    return trees


def tree_of(tokens: list[int], request_number: int, steps: list[Call]) -> Drafted:
    """The tree of one request. The feedback given to a column identifies its parent."""
    rows = slice(request_number * TOPK, (request_number + 1) * TOPK)
    nodes, moved = [], 0
    paths: list[list[int]] = [[]] * TOPK
    for level, step in enumerate(steps):
        parents = [0] * TOPK
        if level:
            given, above = step.hidden[rows], steps[level - 1].out.feedback[rows]
            parents = [int((above == each).all(dim=1).int().argmax()) for each in given]
            moved += sum(parent != column for column, parent in enumerate(parents))
        paths = [[*paths[parent], int(token)] for parent, token in zip(parents, step.tokens[rows], strict=True)]
        nodes.extend(zip(paths, step.out.normed[rows], strict=True))
    return Drafted(tokens, nodes, moved)


def largest_error(pair: Pair, size: int) -> float:
    """The largest difference between a drafted node's logits and those of its path alone, over three requests."""
    spy = SpyHead(pair.head)
    settings = {"nodes": size, "page_size": 4, "chunked_prefill_size": 16, "coupling": False}
    engine = speculative(pair.target, spy, STEPS, TOPK, **settings)
    trees = drafted_trees(engine, spy)
    prompts = torch.randint(0, 62, (3, 23), generator=torch.Generator().manual_seed(5)).tolist()
    sampling = {"max_tokens": 26, "ignore_eos": True, "temperature": 0.8}
    run(engine, [request(i, p[: 9 + 7 * i], seed=i, **sampling) for i, p in enumerate(prompts)])
    assert sum(tree.moved for tree in trees) > len(trees), "no tree in which a node changes its column proves nothing"
    errors = []
    for tree in trees:
        features = features_of(pair.target, tree.text[:-1], pair.head.aux_boundaries)
        first = pair.head.logits(extend(pair.head, features, tree.text, Recording()).normed[-1:])
        best = pair.head.target_ids(first.topk(TOPK).indices[0]).tolist()
        assert sorted(path[0] for path, _ in tree.nodes[:TOPK]) == sorted(best)
        for path, normed in tree.nodes:
            expected = follow_path(pair.head, features, tree.text, path)[-1]
            errors.append(float((pair.head.logits(normed[None])[0] - expected).abs().max()))
    assert len(errors) > 100
    return max(errors)


@eagle_is_deep
@pytest.mark.parametrize("size", [pytest.param(13, marks=pytest.mark.deep), 4])
def test_drafting_a_tree_equals_drafting_each_of_its_paths_alone(pair: Pair, size: int) -> None:
    """Size 4: drafting needs more slots than verification."""
    assert largest_error(pair, size) < TOLERANCE


@eagle_is_deep
def test_attending_to_columns_instead_of_ancestors_is_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of a known server: column c of a level attends to column c of the levels above, not to ancestors."""
    advance = EagleDraftInput.advance

    def by_column(
        self: EagleDraftInput, tokens: Tensor, scores: Tensor, feedback: Tensor, out: Tensor | None = None
    ) -> tuple[EagleDraftInput, Tensor]:
        frontier, chosen = advance(self, tokens, scores, feedback, out)
        own = frontier.ancestor_mask & (frontier.window.column_steps == frontier.step)
        return replace(frontier, ancestor_mask=self.ancestor_mask | own), chosen

    monkeypatch.setattr(EagleDraftInput, "advance", by_column)
    assert largest_error(pair, 13) > 100 * TOLERANCE
