"""`walk_tree` and `verify_tree_greedy`, torch twin and kernel, against a walk in plain Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_server.attention.spec_info import retrive_links
from eagle_server.ops.tree.accept import walk_tree
from eagle_server.ops.tree.build import ancestors
from tests.support.covering import covering
from tests.support.kernels import climb, each_variant, generator, on_device, random_parents
from tests.support.reference import verify_tree_greedy

SIZES = [(1, 1, 0), (3, 1, 2), (3, 2, 1), (5, 6, 5), (5, 13, 4), (3, 64, 7), (2, 256, 10)]


class Case:
    """Random trees, and draws that mostly equal the token of a child. `distinct`: siblings have different tokens."""

    def __init__(self, bs: int, size: int, deepest: int, *, distinct: bool, seed: int) -> None:
        source = generator(bs, size, seed)
        self.parents = random_parents(bs, size, deepest, source)
        self.steps = deepest
        vocab = 4
        self.tokens = torch.randint(vocab, (bs, size), generator=source)
        if distinct:  # a node's rank among its siblings
            earlier = (self.parents[:, :, None] == self.parents[:, None, :]).tril(-1)
            self.tokens = earlier.sum(-1)
        self.tokens[:, 1:].masked_fill_(torch.rand(bs, size - 1, generator=source) < 0.1, -1)  # padding
        self.drawn = torch.randint(vocab, (bs, size), generator=source)
        for child in range(size - 1, 0, -1):  # at half of the inner nodes the draw equals a child
            follow = torch.rand(bs, generator=source) < 0.5
            place = self.parents[:, child : child + 1]
            kept = torch.where(follow[:, None], self.tokens[:, child : child + 1], self.drawn.gather(1, place))
            self.drawn.scatter_(1, place, kept)
        self.finite = torch.rand(bs, size, generator=source) < 0.8
        self.mask, self.depths = ancestors(self.parents, deepest)

    def walk(self) -> tuple[Tensor, ...]:
        wrong = torch.tensor([float("nan"), float("inf"), -float("inf")])[torch.arange(self.finite.shape[1]) % 3]
        scores = torch.where(self.finite, -1.5, wrong)
        parts = on_device(self.tokens, self.parents, self.depths, self.mask, self.drawn, scores)
        return tuple(result.cpu() for result in walk_tree(*parts, self.steps))

    def walk_links(self) -> tuple[Tensor, ...]:
        tokens, parents, drawn = on_device(self.tokens, self.parents, self.drawn)
        return tuple(result.cpu() for result in verify_tree_greedy(tokens, *retrive_links(parents), drawn, self.steps))

    def agrees(self, request: int, node: int) -> bool:
        """Whether a node's token equals its parent's draw."""
        return bool(self.tokens[request, node] == self.drawn[request, self.parents[request, node]])


@each_variant(walk_tree)
@pytest.mark.parametrize(("bs", "size", "deepest"), SIZES)
def test_the_walk_takes_the_longest_path_of_agreeing_nodes(variant: str, bs: int, size: int, deepest: int) -> None:
    case = Case(bs, size, deepest, distinct=False, seed=0)
    path, accept_length, tokens, drafted, finite = case.walk()
    for request, links in enumerate(case.parents.tolist()):
        paths = [climb(links, node)[::-1] for node in range(size)]
        reached = [each for each in paths if all(case.agrees(request, node) for node in each[1:])]
        expected = max(reached, key=len)
        padding = [-1] * (deepest + 1 - len(expected))
        assert path[request].tolist() == expected + padding
        assert tokens[request].tolist() == case.drawn[request, expected].tolist() + padding
        assert int(accept_length[request]) == len(expected) - 1
        assert int(drafted[request]) == int((case.tokens[request, 1:] >= 0).sum())
        assert bool(finite[request]) == bool(case.finite[request, expected].all())


@each_variant(walk_tree)
@pytest.mark.parametrize(("bs", "size", "deepest"), SIZES)
def test_the_links_lead_to_the_first_child_that_equals_the_draw(variant: str, bs: int, size: int, deepest: int) -> None:
    case = Case(bs, size, deepest, distinct=False, seed=1)
    path, accept_length, tokens = case.walk_links()
    for request, links in enumerate(case.parents.tolist()):
        expected = [0]
        while fit := [n for n in range(1, size) if links[n] == expected[-1] and case.agrees(request, n)]:
            expected.append(fit[0])
        padding = [-1] * (deepest + 1 - len(expected))
        assert path[request].tolist() == expected + padding
        assert tokens[request].tolist() == case.drawn[request, expected].tolist() + padding
        assert int(accept_length[request]) == len(expected) - 1


@each_variant(walk_tree)
@pytest.mark.parametrize(("bs", "size", "deepest", "seed"), covering(SIZES[3:6], range(5), together=1))
def test_both_walks_are_equal_where_siblings_differ(variant: str, bs: int, size: int, deepest: int, seed: int) -> None:
    """With equal siblings the links may follow the one with the shorter continuation, but never a longer path."""
    case = Case(bs, size, deepest, distinct=True, seed=seed)
    by_parents, by_links = case.walk(), case.walk_links()
    for one, other in zip(by_parents, by_links, strict=False):
        assert torch.equal(one, other)
    assert 0 < int(by_parents[1].sum()) < bs * deepest, "neither refused nor accepted anything"
    case = Case(bs, size, deepest, distinct=False, seed=seed)
    assert bool((case.walk_links()[1] <= case.walk()[1]).all())


@pytest.mark.parametrize("variant", ["native"])
@pytest.mark.parametrize(
    ("part", "value"), [("depths", 3), ("depths", -1), ("depths", 1 << 40), ("parents", 13), ("parents", -1)]
)
def test_the_native_walk_refuses_a_tree_that_its_arrays_do_not_hold(variant: str, part: str, value: int) -> None:
    case = Case(2, 13, 2, distinct=False, seed=0)
    getattr(case, part)[1, 7] = value
    with pytest.raises(ValueError, match=r"a node deeper than 2 steps, or a parent that is none of its 13 nodes"):
        case.walk()
