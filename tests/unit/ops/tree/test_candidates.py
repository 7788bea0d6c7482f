"""The best children and candidates: torch twin and kernel against sorting in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle_server.ops.tree.candidates import best_candidates, best_children
from tests.support.kernels import DEVICE, each_variant, generator, on_device, with_triton


def lineages(bs: int, topk: int, step: int, width: int) -> Tensor:
    """A random ancestor_mask of the nodes of `step`, in a wider window."""
    mask = torch.zeros(bs, topk, width, dtype=torch.bool)
    mask[:, :, : step * topk] = torch.rand(bs, topk, step * topk, generator=generator(bs, topk)) < 0.5
    for node in range(topk):
        mask[:, node, step * topk + node] = True
    return mask


def sorted_by_score(scores: list[float]) -> list[int]:
    """Places, best first. Ties go to the lower place, NaN comes last."""
    worth = [-math.inf if math.isnan(score) else score for score in scores]
    return sorted(range(len(scores)), key=lambda place: (-worth[place], place))


@each_variant(best_children)
@pytest.mark.parametrize(("bs", "topk", "step", "width"), [(1, 1, 0, 3), (3, 4, 1, 13), (2, 8, 4, 48), (5, 3, 2, 12)])
def test_the_best_children_see_what_their_parents_saw_and_themselves(
    variant: str, bs: int, topk: int, step: int, width: int
) -> None:
    scores = torch.randn(bs, topk, topk, generator=generator(bs, step))
    tokens = torch.randint(1000, (bs, topk, topk), generator=generator(topk))
    mask = lineages(bs, topk, step, width)
    found = [x.cpu() for x in best_children(*on_device(scores, tokens, mask), step + 1)]
    best, following, chosen_, rows, seen = found
    for b in range(bs):
        order = sorted_by_score(scores[b].view(-1).tolist())[:topk]
        assert chosen_[b].tolist() == order
        assert torch.equal(best[b], scores[b].view(-1)[order])
        assert torch.equal(following[b], tokens[b].view(-1)[order])
        for node, child in enumerate(order):
            parent = child // topk
            assert rows[b * topk + node] == b * topk + parent
            expected = mask[b, parent].clone()
            expected[(step + 1) * topk + node] = True
            assert torch.equal(seen[b, node], expected)


@each_variant(best_children)
def test_views_of_one_row_are_accepted(variant: str) -> None:
    """The first frontier's mask is the same for all requests."""
    scores, tokens = torch.randn(3, 2, 2, generator=generator()), torch.arange(12).view(3, 2, 2)
    mask = torch.eye(2, 6, dtype=torch.bool).to(DEVICE).expand(3, -1, -1)
    found = best_children(*on_device(scores, tokens), mask, 1)
    same = best_children(*on_device(scores, tokens), mask.contiguous(), 1)
    assert all(torch.equal(x, y) for x, y in zip(found, same, strict=True))


@with_triton
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
def test_ties_go_to_the_lower_child_and_nan_comes_last(variant: str) -> None:
    nan = float("nan")
    scores = torch.tensor([[nan, -1.0, -1.0], [-1.0, nan, -math.inf], [-2.0, -math.inf, nan]])[None]
    found = best_children(*on_device(scores, torch.arange(9).view(1, 3, 3), lineages(1, 3, 0, 6)), 1)
    assert found.chosen.tolist() == [[1, 2, 3]]
    hopeless = torch.full((1, 3, 3), nan)
    found = best_children(*on_device(hopeless, torch.arange(9).view(1, 3, 3), lineages(1, 3, 0, 6)), 1)
    assert found.chosen.tolist() == [[0, 1, 2]], "indices stay in range"


@each_variant(best_candidates)
@pytest.mark.parametrize("guessed", [False, True])
@pytest.mark.parametrize(("bs", "size", "count"), [(1, 1, 1), (3, 8, 8), (2, 72, 63), (4, 328, 63), (2, 1100, 500)])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
def test_the_best_candidates_keep_their_order(variant: str, bs: int, size: int, count: int, guessed: bool) -> None:
    """Many ties, zeros of both signs, -inf and NaN."""
    source = generator(size)
    scores = torch.randint(-4, 3, (bs, size), generator=source) / 4
    scores = torch.where(torch.rand(bs, size, generator=source) < 0.5, scores, -scores)
    scores[:, 3::7] = -math.inf
    scores[:, 5::11] = float("nan")
    tokens = torch.randint(99, (bs, size), generator=source)
    guesses = torch.randn(bs, size, generator=source) if guessed else None
    given = [None if x is None else x.to(DEVICE) for x in (scores, tokens, guesses)]
    found = best_candidates(*given, count)  # type: ignore[arg-type]
    for b in range(bs):
        expected = sorted(sorted_by_score(scores[b].tolist())[:count])
        assert found.selected[b].tolist() == expected
        assert torch.equal(found.tokens[b].cpu(), tokens[b][expected])
        wanted = scores[b][expected].nan_to_num(nan=-math.inf, neginf=-math.inf)
        assert torch.equal(found.scores[b].cpu(), wanted)
        assert (found.guesses is None) == (guesses is None)
        if guesses is not None and found.guesses is not None:
            assert torch.equal(found.guesses[b].cpu(), guesses[b][expected])
