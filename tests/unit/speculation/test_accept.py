"""Acceptance against a plain walk along the tree's links."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_server.speculation.accept import Acceptance, Accepted, Lossless
from eagle_server.speculation.sampling import SamplingBatch
from eagle_server.speculation.tree import Tree, compacted
from eagle_server.speculation.typical import Typical
from tests.support.sampling import request_sampling
from tests.support.trees import children, path_to, pruned, tree_of

GREEDY = request_sampling(temperature=0.0)
VOCAB = 5
EXAMPLE = tree_of([[-1, 0, 0, 1, 1, 4]], [[99, 11, 12, 21, 22, 33]], [4], 3)


def accepted(tree: Tree, draws: list[list[int]], vocab: int = VOCAB) -> Accepted:
    """The lossless rule with logits that are largest at `draws`."""
    logits = torch.nn.functional.one_hot(torch.tensor(draws).view(-1), vocab).float()
    return Lossless().accept(tree, logits, SamplingBatch.of([GREEDY] * len(draws), logits.device))


def test_the_worked_example_accepts_three_and_a_bonus() -> None:
    result = accepted(EXAMPLE, [[11, 22, 0, 0, 33, 77]], vocab=100)
    assert result.path.tolist() == [[0, 1, 4, 5]]
    assert result.accept_length.tolist() == [3]
    assert result.tokens.tolist() == [[11, 22, 33, 77]]


def test_a_refused_root_emits_the_targets_token_alone() -> None:
    result = accepted(EXAMPLE, [[50, 22, 0, 0, 33, 77]], vocab=100)
    assert result.path.tolist() == [[0, -1, -1, -1]]
    assert result.accept_length.tolist() == [0]
    assert result.tokens.tolist() == [[50, -1, -1, -1]]


def test_a_node_that_agrees_below_a_refused_one_is_not_reached() -> None:
    result = accepted(EXAMPLE, [[12, 22, 40, 0, 33, 77]], vocab=100)
    assert result.path.tolist() == [[0, 2, -1, -1]]
    assert result.tokens.tolist() == [[12, 40, -1, -1]]


@st.composite
def trees(draw_value: st.DrawFn, *, distinct: bool) -> tuple[Tree, list[list[int]]]:
    """Random trees of random shapes, with random draws that often agree. With `distinct`, siblings' tokens differ."""
    bs, size = draw_value(st.integers(1, 3)), draw_value(st.integers(1, 9))
    parents, tokens, draws = [], [], []
    for _ in range(bs):
        links, ids = [-1], [0]
        for node in range(1, size):
            free = {parent: set(range(VOCAB)) for parent in range(node)}
            for child, parent in enumerate(links[1:], 1):
                free[parent].discard(ids[child])
            open_nodes = [parent for parent in free if free[parent] or not distinct]
            links.append(draw_value(st.sampled_from(open_nodes)))
            choices = sorted(free[links[-1]]) if distinct else range(VOCAB)
            ids.append(draw_value(st.sampled_from(choices)))
        parents.append(links)
        tokens.append(ids)
        draws.append(draw_value(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size)))
    deepest = max(len(path_to(links, node)) - 1 for links in parents for node in range(size))
    steps = deepest + (draw_value(st.integers(0, 2)) if size > 1 else 0)
    return tree_of(parents, tokens, [3 + r for r in range(bs)], steps), draws


@given(trees(distinct=True))
def test_the_path_is_the_walk_along_the_links(drawn) -> None:
    tree, draws = drawn
    result = accepted(tree, draws)
    bs, size = tree.parents.shape
    tokens = tree.tokens
    for r in range(bs):
        path = [0]
        while following := [c for c in children(tree, r, path[-1]) if int(tokens[r, c]) == draws[r][path[-1]]]:
            path.append(following[0])
        padding = [-1] * (tree.steps + 1 - len(path))
        assert result.path[r].tolist() == path + padding
        assert int(result.accept_length[r]) == len(path) - 1
        assert result.tokens[r].tolist() == [draws[r][node] for node in path] + padding


@given(trees(distinct=False))
def test_among_siblings_with_one_token_the_longest_path_is_taken(drawn) -> None:
    tree, draws = drawn
    result = accepted(tree, draws)
    bs, size = tree.parents.shape
    tokens = tree.tokens
    for r in range(bs):
        links = tree.parents[r].tolist()
        reached = [
            path
            for path in (path_to(links, node) for node in range(size))
            if all(int(tokens[r, child]) == draws[r][parent] for parent, child in zip(path, path[1:], strict=False))
        ]
        path = max(reached, key=len)
        assert result.path[r].tolist()[: len(path)] == path
        assert int(result.accept_length[r]) == len(path) - 1
        assert result.tokens[r].tolist()[: len(path)] == [draws[r][node] for node in path]


def test_a_chain_and_a_tree_of_its_path_emit_the_same() -> None:
    """The tree decides how many tokens are accepted, but never which."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(10, (10, 10), generator=generator)  # the draw after tokens a, b
    chain = tree_of([[-1, 0, 1, 2]], [[3, int(target[0, 3]), 5, 6]], [7], 3)
    tree = tree_of([[-1, 0, 0, 2]], [[3, 9, int(target[0, 3]), int(target[3, target[0, 3]])]], [7], 3)
    texts = []
    for each in (chain, tree):
        tokens, links = each.tokens[0].tolist(), each.parents[0].tolist()
        before = [0, *(tokens[parent] for parent in links[1:])]
        draws = [int(target[a, b]) for a, b in zip(before, tokens, strict=True)]
        result = accepted(each, [draws], vocab=10)
        texts.append(result.tokens[0, : int(result.accept_length[0]) + 1].tolist())
    assert texts[0] == texts[1][: len(texts[0])]
    assert len(texts[1]) > len(texts[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_own_request_where_they_are_on_its_path(
    temperature: float, value: float
) -> None:
    tree = tree_of([[-1, 0, 0]] * 4, [[1, 2, 3]] * 4, [3, 4, 5, 6], 1)
    logits = torch.zeros(4, 3, VOCAB)
    logits[:, 0, 2] = 90.0  # node 1 is accepted, node 2 refused
    logits[1, 0, 4] = value
    logits[2, 1, 4] = value
    logits[3, 2, 4] = value
    setting = request_sampling(key=1, temperature=temperature)
    result = Lossless().accept(tree, logits.view(12, VOCAB), SamplingBatch.of([setting] * 4, logits.device))
    assert result.finite.tolist() == [True, False, False, True]
    assert result.accept_length.tolist()[2:] == [1, 1]


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 4,
    "sampled": [{"temperature": t} for t in (1.0, 0.0, 0.7, 1.6)],
    "truncated": [{"temperature": 1.0, "top_k": 3}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {}],
    "min_p": [{"temperature": 1.0, "min_p": 0.2}, {"temperature": 1.0}, {"temperature": 0.0}, {}],
    "bad words": [{"temperature": t, "bad_words": ((1, 2), (3,), (0, 4, 2))} for t in (0.0, 0.7, 1.0, 1.0)],
    "bias": [{"temperature": 0.0}, {"temperature": 1.0, "logit_bias": ((1, 2.0), (2, -1.0))}, {}, {}],
}


@pytest.mark.parametrize("rule", [Lossless(), Typical(0.2, 0.5)], ids=["lossless", "typical"])
@pytest.mark.parametrize("name", SETTINGS)
def test_compacted_trees_are_accepted_bit_for_bit_as_padded_ones(name: str, rule: Acceptance) -> None:
    generator, steps, bs, size = torch.Generator().manual_seed(len(name)), 4, 4, 9
    settings = [request_sampling(**{"key": n, "temperature": 0.9, **own}) for n, own in enumerate(SETTINGS[name])]
    sampling = SamplingBatch.of(settings, torch.device("cpu"), steps)
    lengths: set[int] = set()
    for _ in range(60):
        links = [[-1, 0, 0, 0, *(int(x) for x in torch.randint(1, 4, (3,), generator=generator)), 4, 5]] * bs
        tokens = torch.randint(VOCAB, (bs, size), generator=generator)
        whole = tree_of(links, tokens.tolist(), [3, 9, 40, 5], steps)
        share = torch.tensor([[0.0], [0.2], [0.5], [1.0]])[torch.randperm(bs, generator=generator)]
        padded = pruned(whole, torch.rand(bs, size - 1, generator=generator) < share)
        tree = compacted(padded)
        logits = 2 * torch.randn(bs * size, VOCAB, generator=generator)
        computed = (padded.tokens.view(-1) >= 0).nonzero()[:, 0]
        expected, found = rule.accept(padded, logits, sampling), rule.accept(tree, logits[computed], sampling)
        width, nodes = tree.steps + 1, computed.view(-1)
        rows = tree.retrive_index.gather(1, found.path.clamp(min=0))
        path = torch.where(found.path < 0, -1, nodes[rows] % size)
        assert torch.equal(path, expected.path[:, :width])
        assert torch.equal(found.tokens, expected.tokens[:, :width])
        assert expected.path[:, width:].eq(-1).all()
        for field in ("accept_length", "drafted", "finite"):
            assert torch.equal(getattr(found, field), getattr(expected, field))
        on_path = found.path >= 0
        scores = expected.scores.gather(1, expected.path[:, :width].clamp(min=0))
        assert torch.equal(found.scores.gather(1, found.path.clamp(min=0))[on_path], scores[on_path])
        lengths |= set(found.accept_length.tolist())
    assert lengths >= {0, 1, 2}
