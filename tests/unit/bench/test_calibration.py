"""The reliability diagram: which nodes count, and what error they show."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from eagle_server.request import DraftTree
from eagle_tools.bench import calibration
from eagle_tools.bench.calibration import Reliability, estimates, mean_error

#         0
#       /   \
#      1     2
#    /  \     \
#   3    4     5
SCORES = [0.0, math.log(0.6), math.log(0.3), math.log(0.3), math.log(0.06), math.log(0.15)]
TREE = DraftTree(token_ids=list(range(6)), parents=[-1, 0, 0, 1, 1, 2], scores=SCORES, path=[1, 4], bonus=9)


def test_a_node_counts_if_its_parent_was_accepted_by_its_chance_given_the_parent() -> None:
    found = list(estimates(TREE))
    assert [(depth, accepted) for depth, _, accepted in found] == [(1, True), (1, False), (2, False), (2, True)]
    assert [chance for _, chance, _ in found] == pytest.approx([0.6, 0.3, 0.5, 0.1])


def test_a_tree_that_its_request_did_not_finish_counts_nothing() -> None:
    assert list(estimates(TREE.cut(1))) == []


def test_a_plain_step_counts_nothing() -> None:
    assert list(estimates(DraftTree(token_ids=[1], parents=[-1], scores=None, path=[], bonus=3))) == []


def test_trees_without_scores_are_refused() -> None:
    blind = DraftTree(token_ids=[1, 2], parents=[-1, 0], scores=None, path=[], bonus=3)
    with pytest.raises(ValueError, match="no estimates"):
        list(estimates(blind))


def test_the_error_is_weighted_by_the_nodes_of_each_bin() -> None:
    first, second = Reliability(), Reliability()
    for accepted in [True] * 3 + [False]:
        first.add(0.75, accepted=accepted)
    for _ in range(12):
        first.add(0.05, accepted=False)
    assert first.error == pytest.approx(12 / 16 * 0.05)
    assert first.counts[0] == 12
    assert first.points() == []  # too few
    for _ in range(48):
        second.add(1.0, accepted=False)
    assert second.error == 1.0
    assert second.points() == [(1.0, 0.0)]
    assert mean_error([first, second]) == pytest.approx((16 * first.error + 48) / 64)


@pytest.mark.deep
def test_the_demos_estimates_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompts", "4", "--max-tokens", "24", "--running", "4", "--temperatures", "0", "1"]
    tree = ["--", "--speculative-num-steps", "3", "--topk", "4"]
    assert calibration.main([*arguments, "--out", str(tmp_path), *tree]) == 0
    document = json.loads((tmp_path / "calibration.json").read_text())
    for temperature in (0, 1):
        depths = document[f"temperature {temperature}"]
        assert len(depths) == 3
        nodes = [sum(depth["counts"]) for depth in depths]
        assert nodes == sorted(nodes, reverse=True)
        assert all(0 <= depth["error"] < 0.6 for depth in depths)
        assert all(0 < sum(depth["accepted"]) < sum(depth["counts"]) for depth in depths[:1])
    assert (tmp_path / "calibration.png").stat().st_size > 5000
    assert "observed acceptance" in capsys.readouterr().out
