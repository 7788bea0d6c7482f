"""Trees from selections, and their links: torch twin and kernel against plain Python."""

from __future__ import annotations

import pytest
import torch

from eagle_server.attention.spec_info import retrive_links
from eagle_server.ops.tree.build import link_tree, select_nodes
from eagle_server.ops.tree.candidates import CandidatePool, Children
from tests.support.drafts import best, draft, example_pool
from tests.support.kernels import DEVICE, climb, each_variant, generator, on_device, random_parents, take


def selection(bs: int, drafted: int, topk: int, steps: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random `selected_index` and `parent_list`, closed under ancestors."""
    source = generator(bs, drafted, topk, seed)
    levels = [list(range(topk))]
    selected, parent_lists = [], []
    for _ in range(bs):
        parents = [-1]
        known = dict.fromkeys(range(topk), -1)
        frontier = levels[0]
        for level in range(1, steps):
            parents += frontier
            first = topk + (level - 1) * topk**2
            children = {first + f * topk + c: frontier[f] for f in range(topk) for c in range(topk)}
            known |= children
            chosen = torch.randperm(topk**2, generator=source)[:topk].tolist()
            frontier = [first + place for place in chosen]
        kept: set[int] = set()
        while len(kept) < drafted:
            open_nodes = [i for i, above in known.items() if i not in kept and (above < 0 or above in kept)]
            kept.add(open_nodes[int(torch.randint(len(open_nodes), (), generator=source))])
        selected.append(sorted(kept))
        parent_lists.append(parents[: topk * (steps - 1) + 1])
    return torch.tensor(selected).view(bs, drafted), torch.tensor(parent_lists)


@each_variant(link_tree)
@pytest.mark.parametrize(
    ("bs", "drafted", "topk", "steps"),
    [
        (1, 1, 1, 1),
        (3, 1, 4, 1),
        (5, 4, 1, 4),
        (3, 12, 4, 3),
        (5, 15, 2, 8),
        (2, 63, 4, 5),
        pytest.param(1, 255, 8, 6, marks=pytest.mark.deep),
    ],
)
def test_every_node_is_linked_to_its_pool_parent(variant: str, bs: int, drafted: int, topk: int, steps: int) -> None:
    selected, parent_list = selection(bs, drafted, topk, steps, seed=0)
    parents, depths, mask = link_tree(*on_device(selected, parent_list), topk, steps)
    for request in range(bs):
        chosen, above = selected[request].tolist(), parent_list[request].tolist()
        number = {-1: 0} | {index: place + 1 for place, index in enumerate(chosen)}
        links = [-1, *(number[above[index // topk]] for index in chosen)]
        assert parents[request].tolist() == links
        assert depths[request].tolist() == [len(climb(links, node)) - 1 for node in range(drafted + 1)]
        for node, row in enumerate(mask[request].tolist()):
            assert [column for column, seen in enumerate(row) if seen] == sorted(climb(links, node))


@each_variant(select_nodes)
@pytest.mark.parametrize(
    ("bs", "topk", "steps", "count"),
    [
        (1, 1, 1, 1),
        (2, 3, 1, 3),
        (3, 1, 5, 4),
        (3, 2, 4, 7),
        (2, 4, 3, 36),
        (2, 3, 5, 16),
        pytest.param(2, 8, 6, 63, marks=pytest.mark.deep),
        (1, 8, 18, 20),  # more candidates than one kernel takes
    ],
)
def test_the_best_candidates_become_a_tree(variant: str, bs: int, topk: int, steps: int, count: int) -> None:
    """Scores with many ties, also between parents and children, and some of -inf."""
    source = generator(bs, topk, steps, count)
    first = -torch.randint(1, 4, (bs, topk), generator=source) / 2
    logp = [-torch.randint(0, 4, (bs, topk, topk), generator=source) / 2 for _ in range(steps - 1)]
    for each in logp[1:]:
        each[:, -1, 0] = -torch.inf
    tokens = [torch.randint(99, (bs, *(topk,) * (2 if level else 1)), generator=source) for level in range(steps)]
    drafted, nodes = draft(first, logp, tokens)
    guesses = [torch.randn(level.scores.shape, generator=source) for level in drafted.levels]
    drafted.levels = [Children(*level[:2], own) for level, own in zip(drafted.levels, guesses, strict=True)]
    given = torch.cat([own.flatten(1) for own in guesses], dim=1)
    roots, lens = torch.arange(bs) + 500, 7 * torch.arange(bs) + 3
    found = select_nodes(*on_device(roots, lens), drafted.to(DEVICE).candidates, count)
    for request in range(bs):
        pool, chosen = nodes[request], best(nodes[request], count)
        number = {-1: 0} | {index: place + 1 for place, index in enumerate(chosen)}
        links = [-1, *(number[pool[index].parent] for index in chosen)]
        assert found.parents[request].tolist() == links
        assert found.tokens[request].tolist() == [500 + request, *(pool[index].token for index in chosen)]
        assert found.scores[request].tolist() == [pool[index].score for index in chosen]
        assert torch.equal(found.guesses[request].cpu(), given[request, chosen])
        depths = [len(climb(links, node)) - 1 for node in range(count + 1)]
        assert found.depths[request].tolist() == depths
        assert found.positions[request].tolist() == [3 + 7 * request + depth for depth in depths]
        for node, row in enumerate(found.mask[request].tolist()):
            assert [column for column, seen in enumerate(row) if seen] == sorted(climb(links, node))


@each_variant(select_nodes)
def test_a_level_that_was_written_in_place_is_part_of_the_pool(variant: str) -> None:
    pool, expected = example_pool(2)[0].to(DEVICE), example_pool(2)[0].tree(5)
    given = pool.candidates
    filled = CandidatePool.empty(given.first, given.steps)
    for step in range(given.steps):
        for part, values in zip(filled.level(step), pool.levels[step + 1], strict=True):
            part.copy_(values)
    filled.fed(1).copy_(pool.chosen[0])
    roots = torch.full((2,), 77, device=DEVICE)
    found = select_nodes(roots, torch.zeros_like(roots), filled, 5)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert torch.equal(found.parents.cpu(), expected.parents)
    assert torch.equal(found.mask.cpu(), expected.mask)


@each_variant(link_tree)
def test_the_worked_example_and_a_root_alone(variant: str) -> None:
    selected, parent_list = torch.tensor([[0, 1, 2, 3, 8]]), torch.tensor([[-1, 0, 1, 2, 3]])
    assert example_pool()[0].tree(5).tokens.tolist() == [[77, 11, 12, 21, 22, 33]]
    parents, depths, _ = link_tree(*on_device(selected, parent_list), 2, 3)
    assert parents.tolist() == [[-1, 0, 0, 1, 1, 4]]
    assert depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    next_token, next_sibling = retrive_links(parents)
    assert next_token.tolist() == [[1, 3, -1, -1, 5, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1]]
    empty = torch.empty(2, 0, dtype=torch.int64, device=DEVICE)
    parents, depths, mask = link_tree(empty, empty, 1, 0)
    assert (parents.tolist(), depths.tolist(), mask.tolist()) == ([[-1]] * 2, [[0]] * 2, [[[True]]] * 2)
    assert [links.tolist() for links in retrive_links(parents)] == [[[-1]] * 2] * 2


@each_variant(link_tree)
@pytest.mark.parametrize(("bs", "size"), [(1, 1), (3, 2), (5, 13), (3, 64), (1, 256)])
def test_the_links_name_first_children_and_next_siblings(variant: str, bs: int, size: int) -> None:
    parents = random_parents(bs, size, 5, generator(bs, size))
    next_token, next_sibling = retrive_links(parents.to(DEVICE))
    for request, links in enumerate(parents.tolist()):
        children = {node: [c for c in range(1, size) if links[c] == node] for node in range(size)}
        assert next_token[request].tolist() == [(children[node] or [-1])[0] for node in range(size)]
        expected = [-1] * size
        for siblings in children.values():
            for one, following in zip(siblings, siblings[1:], strict=False):
                expected[one] = following
        assert next_sibling[request].tolist() == expected


@pytest.mark.parametrize(
    ("selected", "above"),
    [
        ([0, 4 + 16], [-1, 0, 1, 2, 3]),  # beyond the last group
        ([-1, 0], [-1, 0]),
        ([0, 4], [-1, 5]),  # the parent comes later
    ],
)
def test_the_native_links_refuse_a_selection_that_is_not_in_its_pool(
    selected: list[int], above: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take("native", monkeypatch)
    with pytest.raises(ValueError, match="not behind its parent, or not one of"):
        link_tree(torch.tensor([selected]), torch.tensor([above]), 4, 2)
