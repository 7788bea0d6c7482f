"""Trees over rows of scores, grown by one native call, against levels one by one."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eagle_server.ops.native.library import available
from eagle_server.ops.tree.candidates import CandidatePool
from eagle_server.speculation.candidates import organize_draft_results
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.draft_ranking import DraftRanking
from tests.support.engines import random_block, random_head, random_target, request, run, speculative

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


@pytest.mark.parametrize("topk", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", ["block", "PEAGLE with a small vocabulary"])
def test_they_are_the_trees_of_the_levels_one_by_one(name: str, topk: int, steps: int) -> None:
    """With and without noise, and with corrected chances."""
    target = random_target()
    head = cast(Any, random_block(target) if name == "block" else random_head(target, "PEAGLE", draft_vocab=24))
    engine = speculative(target, head, steps, topk, estimating=True)
    proposer = cast(Any, engine.worker.drafter).proposer
    at_once, seen = proposer._grow_at_once, set[bool]()

    def compared(roots: Tensor, seq_lens: Tensor, scores: Tensor, nodes: int, ranking: DraftRanking) -> Tree:
        tree: Tree = at_once(roots, seq_lens, scores, nodes, ranking)
        levels = CandidatePool.of(*proposer._grow(roots, scores, scores, ranking))
        one_by_one = organize_draft_results(roots, seq_lens, levels, nodes)
        for part in ("tokens", "parents", "depths", "mask", "positions"):
            assert torch.equal(getattr(tree, part), getattr(one_by_one, part))
        for part in ("scores", "guesses"):
            torch.testing.assert_close(getattr(tree, part), getattr(one_by_one, part), rtol=0, atol=1e-4)
        assert (tree.steps, tree.topk) == (one_by_one.steps, one_by_one.topk)
        seen.add(ranking.noise is not None)
        return tree

    proposer._grow_at_once = compared
    run(engine, [request(i, [3 + i, 4], max_tokens=60, temperature=0.7 * (i % 3)) for i in range(4)])
    run(engine, [request("greedy", [5], max_tokens=6)])
    assert seen == {False, True}
    estimates = engine.worker.batches.estimates
    assert estimates is not None
    assert estimates._ratios.abs().max() > 0.1
