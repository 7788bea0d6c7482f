"""The tree: the worked example of the reference, and properties for every candidate pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_server.attention.spec_info import EagleVerifyInput
from eagle_server.speculation.tree import Tree, compacted, root_alone
from tests.support.drafts import ROOT, PoolNode, best, draft, example_pool, pool_lineage
from tests.support.reference import flat_custom_mask, page_arguments
from tests.support.trees import children, path_to, pruned, tree_of

EXAMPLE_MASK = ["100000", "110000", "101000", "110100", "110010", "110011"]


@pytest.fixture
def example() -> Tree:
    """Two requests with the same candidates, at lengths 4 and 7."""
    tree = example_pool(2)[0].tree(5, 99)
    return replace(tree, positions=torch.tensor([[4], [7]]) + tree.depths)


def rows(mask: torch.Tensor) -> list[str]:
    return ["".join(str(int(bit)) for bit in row) for row in mask]


def test_the_worked_example_selects_and_links_its_nodes(example: Tree) -> None:
    verify = EagleVerifyInput(example)
    assert example.tokens.tolist() == [[99, 11, 12, 21, 22, 33]] * 2
    assert verify.draft_token.tolist() == [99, 11, 12, 21, 22, 33] * 2
    assert (verify.spec_steps, verify.topk, verify.draft_token_num) == (3, 2, 6)
    assert example.parents.tolist() == [[-1, 0, 0, 1, 1, 4]] * 2
    assert example.depths.tolist() == [[0, 1, 1, 2, 2, 3]] * 2
    assert verify.positions.tolist() == [4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10]
    assert verify.retrive_index.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert verify.retrive_next_token.tolist() == [[1, 3, -1, -1, 5, -1]] * 2
    assert verify.retrive_next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1]] * 2
    assert [rows(mask) for mask in verify.custom_mask] == [EXAMPLE_MASK] * 2


def test_the_worked_example_plans_its_verify_pass(example: Tree) -> None:
    """Section 6 of the reference, with the requests at req_pool_indices 2 and 0."""
    req_to_token = torch.arange(100, 160, dtype=torch.int32).view(3, 20)
    req_pool_indices, lens = torch.tensor([2, 0]), torch.tensor([4, 7])
    kv_indices, kv_indptr, qo_indptr, mask = EagleVerifyInput(example).generate_attn_arg_prefill(
        req_pool_indices, lens, req_to_token
    )
    assert qo_indptr.tolist() == [0, 6, 12]
    assert kv_indptr.tolist() == [0, 10, 23]
    assert kv_indices.tolist() == [*range(140, 150), *range(100, 113)]
    assert mask is not None
    mask = flat_custom_mask(mask, lens)
    assert len(mask) == 138
    assert rows(mask[:60].view(6, 10)) == ["1111" + bits for bits in EXAMPLE_MASK]
    assert rows(mask[60:].view(6, 13)) == ["1111111" + bits for bits in EXAMPLE_MASK]


def test_the_worked_example_packs_into_the_published_bytes(example: Tree) -> None:
    req_to_token = torch.zeros(1, 20, dtype=torch.int32)
    one = tree_of(example.parents[:1].tolist(), [[0] * 6], [4], 3)
    *_, mask = EagleVerifyInput(one).generate_attn_arg_prefill(torch.tensor([0]), torch.tensor([4]), req_to_token)
    assert mask is not None
    mask = flat_custom_mask(mask, torch.tensor([4]))
    bits = torch.cat([mask, mask.new_zeros(-len(mask) % 8)]).view(-1, 8).long()
    assert (bits << torch.arange(8)).sum(1).tolist() == [31, 252, 240, 197, 47, 63, 253, 12]
    window = (example.mask[0].long() << torch.arange(6)).sum(1)
    assert window.tolist() == [1, 3, 5, 11, 19, 51]


def test_page_arguments_count_pages_and_the_last_ones_length() -> None:
    """The worked example's lengths 10 and 13 with pages of 16, and lengths at and after the end of a page."""
    pages = torch.tensor([[5, 2, 9], [7, 1, 4], [3, 6, 8]])
    req_to_token = (pages[:, :, None] * 16 + torch.arange(16)).view(3, 48).int()
    arguments = page_arguments(torch.tensor([0, 1]), torch.tensor([10, 13]), req_to_token, 16)
    assert [each.tolist() for each in arguments] == [[0, 1, 2], [5, 7], [10, 13]]
    arguments = page_arguments(torch.tensor([2, 0, 1]), torch.tensor([16, 17, 48]), req_to_token, 16)
    assert [each.tolist() for each in arguments] == [[0, 1, 3, 6], [3, 5, 2, 7, 1, 4], [16, 1, 16]]


def test_a_tree_of_nothing_but_its_root_is_plain_decoding() -> None:
    tree = root_alone(torch.tensor([5, 6]), torch.tensor([3, 9]))
    assert tree.tokens.tolist() == [[5], [6]]
    assert tree.positions.tolist() == [[3], [9]]
    assert tree.mask.tolist() == [[[True]], [[True]]]
    assert EagleVerifyInput(tree).retrive_next_token.tolist() == [[-1], [-1]]


@st.composite
def pools(draw_value: st.DrawFn) -> tuple[object, list[list[PoolNode]], int, int]:
    """Candidate pools with few distinct scores, so that most of them tie. Some scores are NaN and -inf."""
    bs, topk, steps = draw_value(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)))
    seed = draw_value(st.integers(0, 2**31))
    spoilt = draw_value(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, -0.5, -0.5, -1.0, float("nan") if spoilt else -2.0, -torch.inf if spoilt else -3.0])

    def scores(*shape: int) -> torch.Tensor:
        return values[torch.randint(len(values), shape, generator=generator)]

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(50, shape, generator=generator)

    logp = [scores(bs, topk, topk) for _ in range(steps - 1)]
    tokens = [ids(bs, topk), *(ids(bs, topk, topk) for _ in range(steps - 1))]
    pool, nodes = draft(scores(bs, topk), logp, tokens)
    return pool, nodes, draw_value(st.integers(1, len(nodes[0]))), steps


@given(pools())
def test_every_tree_is_the_best_of_its_pool_and_closed_under_ancestors(drafted) -> None:
    pool, nodes, count, steps = drafted
    seq_lens = torch.arange(3, 3 + len(nodes))
    tree = pool.tree(count, 77, seq_lens)
    assert tree.size == count + 1
    assert tree.steps == steps
    for r, known in enumerate(nodes):
        selected = best(known, count)
        number = {ROOT: 0} | {index: place + 1 for place, index in enumerate(selected)}
        assert tree.tokens[r].tolist() == [77, *(known[i].token for i in selected)]
        assert all(known[i].parent in number for i in selected), "not closed under ancestors"
        assert tree.parents[r].tolist() == [-1, *(number[known[i].parent] for i in selected)]
        paths = [[0], *([0, *(number[i] for i in pool_lineage(known, index))] for index in selected)]
        assert all(parent < child for path in paths for parent, child in zip(path, path[1:], strict=False))
        assert tree.depths[r].tolist() == [len(path) - 1 for path in paths]
        assert tree.positions[r].tolist() == [int(seq_lens[r]) + len(path) - 1 for path in paths]
        assert [row.nonzero().flatten().tolist() for row in tree.mask[r]] == paths


@given(pools())
def test_the_links_lead_to_every_child_once_in_rising_order(drafted) -> None:
    pool, nodes, count, _ = drafted
    tree = pool.tree(count)
    for r in range(len(nodes)):
        parents = tree.parents[r].tolist()
        for node in range(count + 1):
            assert list(children(tree, r, node)) == [i for i, parent in enumerate(parents) if parent == node]


def test_the_worked_example_is_compacted() -> None:
    """The first request keeps 11, 22 and 33; the second keeps 12 alone."""
    tokens = [[99, 11, -1, -1, 22, 33], [98, -1, 12, -1, -1, -1]]
    padded = replace(tree_of([[-1, 0, 0, 1, 1, 4]] * 2, tokens, [4, 7], 3), scores=-torch.arange(10.0).view(2, 5))
    tree = compacted(padded)
    assert tree.tokens.tolist() == [[99, 11, 22, 33], [98, 12, -1, -1]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, 0, 0]]
    assert tree.depths[0].tolist() == [0, 1, 2, 3]
    assert tree.positions[:, :2].tolist() == [[4, 5], [7, 8]]
    assert rows(tree.mask[0]) == ["1000", "1100", "1110", "1111"]
    assert tree.counts is not None
    assert tree.rows is not None
    assert tree.counts.tolist() == [4, 2]
    assert tree.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.retrive_index.tolist() == [[0, 1, 2, 3], [4, 5, 4, 4]]
    assert tree.scores is not None
    assert tree.proposed is not None
    assert tree.scores[0].tolist() == [0.0, -3.0, -4.0]
    assert tree.proposed[0].tolist() == [0, 3, 4]
    assert tree.proposed[1, 0].tolist() == 1
    kv_indices, kv_indptr, qo_indptr, _ = EagleVerifyInput(tree).generate_attn_arg_prefill(
        torch.tensor([1, 0]), torch.tensor([4, 7]), torch.arange(40, dtype=torch.int32).view(2, 20)
    )
    assert qo_indptr.tolist() == [0, 4, 6]
    assert kv_indptr.tolist() == [0, 8, 17]
    assert kv_indices.tolist() == [*range(20, 28), *range(9)]


def test_trees_without_padding_are_not_compacted_and_roots_are_a_chain_of_one_node(example: Tree) -> None:
    assert compacted(example) is example
    roots = compacted(pruned(example, torch.ones(2, 5, dtype=torch.bool)))
    assert (roots.size, roots.topk, roots.steps) == (1, 1, 0)
    assert roots.tokens.tolist() == [[99], [99]]
    assert roots.positions.tolist() == [[4], [7]]
    assert (roots.counts, roots.rows, EagleVerifyInput(roots).tree_mask) == (None, None, None)


@given(st.integers(1, 4), st.integers(2, 10), st.integers(0, 1 << 30))
def test_a_compacted_tree_has_the_paths_of_its_nodes(bs: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    links = [[-1, *(int(torch.randint(n, (1,), generator=generator)) for n in range(1, size))] for _ in range(bs)]
    tokens = torch.randint(100, (bs, size), generator=generator)
    whole = tree_of(links, tokens.tolist(), list(range(3, 3 + bs)), size)
    dropped = torch.rand(bs, size - 1, generator=generator) < torch.rand(bs, 1, generator=generator)
    padded = pruned(whole, dropped)
    tree = compacted(padded)
    old, new = padded.tokens, tree.tokens
    for r in range(bs):
        kept = old[r].ge(0).nonzero()[:, 0].tolist()
        parents = tree.parents[r].tolist()
        texts = [[int(old[r, each]) for each in path_to(links[r], node)] for node in kept]
        assert texts == [[int(new[r, each]) for each in path_to(parents, node)] for node in range(len(kept))]
        assert new[r, len(kept) :].eq(-1).all()
        seen = [mask.nonzero()[:, 0].tolist() for mask in tree.mask[r, : len(kept)]]
        assert seen == [path_to(parents, node) for node in range(len(kept))]
        assert tree.depths[r, : len(kept)].tolist() == [len(text) - 1 for text in texts]
        if tree.proposed is not None:
            assert [0, *(tree.proposed[r] + 1).tolist()][: len(kept)] == kept
    assert tree.steps == (size if tree.proposed is None else int(tree.depths.max()))
    assert (tree.topk == 1) == all(
        parents[:n] == [*range(-1, n - 1)]
        for parents, n in zip(tree.parents.tolist(), old.ge(0).sum(1).tolist(), strict=True)
    )
    assert int(tree.retrive_index.max()) + 1 == int(old.ge(0).sum())
    computed = tree.tokens.view(-1) if tree.rows is None else tree.tokens.view(-1)[tree.rows]
    assert computed.tolist() == old[old >= 0].tolist()
