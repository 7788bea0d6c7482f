"""Trees over rows of scores, grown by one native call, against levels one by one."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eagle_server.models.drafts.block_edges import EdgeConfig
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.native.drafting import SelectorRows, row_trees
from eagle_server.ops.native.library import available
from eagle_server.ops.native.sampling import NativeScoring
from eagle_server.ops.tree.candidates import CandidatePool
from eagle_server.speculation.candidates import organize_draft_results
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.draft_ranking import DraftRanking
from tests.support.engines import random_block, random_head, random_target, request, run, speculative

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


def head_of(target: TargetModel, name: str) -> Any:
    if name.startswith("PEAGLE"):
        return random_head(target, "PEAGLE", draft_vocab=24)
    count = int(name.split()[3]) if "selector" in name else 0
    return random_block(target, EdgeConfig("selector", 6, candidates=count) if count else None)


@pytest.mark.parametrize("topk", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", ["block", "a selector of 3", "a selector of 16", "PEAGLE with a small vocabulary"])
def test_they_are_the_trees_of_the_levels_one_by_one(name: str, topk: int, steps: int) -> None:
    """With and without noise, and with corrected chances."""
    target = random_target()
    head = head_of(target, name)
    engine = speculative(target, head, steps, topk, estimating=True)
    proposer = cast(Any, engine.worker.drafter).proposer
    at_once, seen = proposer._grow_at_once, set[bool]()

    def compared(
        roots: Tensor, seq_lens: Tensor, scores: Tensor, nodes: int, ranking: DraftRanking, edges: SelectorRows | None
    ) -> Tree:
        assert (edges is not None) == ("selector" in name)
        tree: Tree = at_once(roots, seq_lens, scores, nodes, ranking, edges)
        levels = CandidatePool.of(*proposer._grow(roots, rows[-1], scores, ranking))
        one_by_one = organize_draft_results(roots, seq_lens, levels, nodes)
        for part in ("tokens", "parents", "depths", "mask", "positions"):
            assert torch.equal(getattr(tree, part), getattr(one_by_one, part))
        for part in ("scores", "guesses"):
            torch.testing.assert_close(getattr(tree, part), getattr(one_by_one, part), rtol=0, atol=1e-4)
        assert (tree.steps, tree.topk) == (one_by_one.steps, one_by_one.topk)
        seen.add(ranking.noise is not None)
        return tree

    def watched(nodes: int, y: Tensor, *others: Any) -> Tree:
        rows.append(y)
        tree: Tree = tree_over(nodes, y, *others)
        return tree

    tree_over, rows = proposer.tree_over, list[Tensor]()
    proposer._grow_at_once, proposer.tree_over = compared, watched
    run(engine, [request(i, [3 + i, 4], max_tokens=60, temperature=0.7 * (i % 3)) for i in range(4)])
    run(engine, [request("greedy", [5], max_tokens=6)])
    assert seen == {False, True}
    estimates = engine.worker.batches.estimates
    assert estimates is not None
    assert estimates._ratios.abs().max() > 0.1


@pytest.mark.parametrize("rank", [6, 32, 40])
def test_codebooks_in_bfloat16_are_read_as_their_numbers(rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    scores, mixed = torch.randn(2 * 3, 50, generator=draw), torch.randn(2 * 3, rank, generator=draw)
    before, after = (torch.randn(50, rank, generator=draw).bfloat16() for _ in range(2))
    found = [
        row_trees(NativeScoring(scores, 50), 2, 3, None, 8, SelectorRows(*books, mixed, torch.tensor([4, 7]), 10))
        for books in ((before, after), (before.float(), after.float()))
    ]
    for part, other in zip(found[0][0], found[1][0], strict=True):
        assert part is not None
        assert torch.equal(part, other)
    without, _ = row_trees(NativeScoring(scores, 50), 2, 3, None, 8)
    assert not torch.equal(without.tokens, found[0][0].tokens)
