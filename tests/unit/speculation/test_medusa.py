"""Medusa's trees as tensors, its presets, and its own acceptance rules."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_server.speculation.static_tree import (
    PRESETS,
    Choices,
    choice_parents,
    parse_choices,
    ranks_of,
    sorted_choices,
    steps_of,
    truncated,
)
from tests.support.reference import TOPK, evaluate_posterior, generate_candidates, generate_medusa_buffers

SMALL = ((0,), (1,), (0, 0), (0, 1))
UNEVEN = ((0,), (0, 0), (0, 1), (1,), (1, 0))
DEPTHS = {
    "mc_sim_7b_63": (10, 28, 23, 2),
    "vicuna_7b_stage1": (10, 32, 20, 1),
    "vicuna_7b_stage1_ablation": (10, 21, 25, 7),
    "vicuna_7b_stage2": (10, 23, 23, 7),
    "vicuna_13b_stage1": (10, 29, 23, 1),
    "vicuna_13b_stage2": (10, 19, 25, 9),
    "vicuna_33b_stage1": (10, 34, 19, 0),
    "vicuna_33b_stage2": (10, 24, 24, 5),
    "zephyr_stage2": (10, 27, 23, 3),
}


@st.composite
def trees(draw: st.DrawFn) -> Choices:
    """Random trees. Nodes are in the order in which they were added."""
    nodes: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 24))):
        parent = draw(st.sampled_from([(), *(node for node in nodes if len(node) < 5)]))
        child = (*parent, draw(st.integers(0, TOPK - 1)))
        if child not in nodes:
            nodes.append(child)
    return tuple(nodes)


def seen(choices: Choices) -> list[list[int]]:
    return (generate_medusa_buffers(choices)["medusa_attn_mask"][0, 0] == 0).int().tolist()


def test_buffers_of_the_worked_examples() -> None:
    found = generate_medusa_buffers(SMALL)
    assert ["".join(map(str, row)) for row in seen(SMALL)] == ["10000", "11000", "10100", "11010", "11001"]
    assert found["medusa_attn_mask"].shape == (1, 1, 5, 5)
    assert set(found["medusa_attn_mask"].flatten().tolist()) == {0.0, float("-inf")}
    assert found["tree_indices"].tolist() == [0, 1, 2, 11, 12]
    assert found["medusa_position_ids"].tolist() == [0, 1, 1, 2, 2]
    assert found["retrieve_indices"].tolist() == [[0, 1, 4], [0, 1, 3], [0, 2, -1]]
    assert found["sorted_medusa_choices"] == [(0,), (1,), (0, 0), (0, 1)]
    other = generate_medusa_buffers([list(node) for node in UNEVEN])
    assert other["tree_indices"].tolist() == [0, 1, 2, 11, 12, 11]
    assert other["medusa_position_ids"].tolist() == [0, 1, 1, 2, 2, 2]
    assert other["retrieve_indices"].tolist() == [[0, 2, 5], [0, 1, 4], [0, 1, 3]]
    assert generate_medusa_buffers(SMALL, topk=2)["tree_indices"].tolist() == [0, 1, 2, 3, 4]


def test_a_rank_beyond_topk_is_refused() -> None:
    with pytest.raises(ValueError, match="a rank of 2 or more"):
        generate_medusa_buffers(((0,), (2,)), topk=2)


@given(trees())
def test_buffers_describe_the_tree(choices: Choices) -> None:
    found, parents = generate_medusa_buffers(choices), choice_parents(choices)
    nodes = [(), *sorted_choices(choices)]
    assert all(parent <= place for place, parent in enumerate(parents)), "parents first"
    for place, node in enumerate(nodes[1:]):
        assert nodes[parents[place]] == node[:-1]
    assert found["medusa_position_ids"].tolist() == [len(node) for node in nodes]
    assert seen(choices) == [[int(node[: len(other)] == other) for other in nodes] for node in nodes]
    assert found["tree_indices"].tolist()[1:] == [1 + (len(n) - 1) * TOPK + n[-1] for n in nodes[1:]]
    paths = [[i for i in path if i >= 0] for path in found["retrieve_indices"].tolist()]
    leaves = [i for i in range(len(nodes)) if i not in parents]
    assert [path[-1] for path in paths] == leaves[::-1]
    assert all([nodes[i] for i in path] == [nodes[path[-1]][:d] for d in range(len(path))] for path in paths)
    assert parse_choices(str(choices)) == choices


@pytest.mark.parametrize("name", DEPTHS)
def test_published_trees(name: str) -> None:
    choices = parse_choices(f" {name} ")
    counts = Counter(map(len, choices))
    assert tuple(counts[depth] for depth in (1, 2, 3, 4)) == DEPTHS[name]
    assert len(choices) == 63
    assert parse_choices(str([list(node) for node in choices])) == choices
    assert ranks_of(choices) == 10
    assert steps_of(truncated(choices, 2)) == 2
    assert parse_choices(str(truncated(choices, 2))) == truncated(choices, 2)


def test_all_published_trees_are_there() -> None:
    assert set(PRESETS) == set(DEPTHS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mc_sim", "'mc_sim' is neither a list .* nor one of mc_sim_7b_63, "),
        ("[(0,)", "neither a list"),
        ("7", "neither a list"),
        ("{}", "neither a list"),
        ("print('no')", "neither a list"),
        ("[]", "1 to 1023 nodes"),
        ("[0, 1]", "0: a node is a tuple of ranks"),
        ("[()]", "a node is a tuple of ranks"),
        ("[(0,), (True,)]", "a node is a tuple of ranks"),
        ("[(0.5,)]", "a node is a tuple of ranks"),
        ("[(0,), (0, -1)]", r"\(0, -1\): ranks count from 0"),
        ("[(0,), [0]]", r"\(0,\) is listed twice"),
        ("[(0,), (1, 0)]", r"\(1, 0\) has no parent: \(1,\) is not in the list"),
    ],
)
def test_other_choices_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_choices(text)


def test_candidates_are_the_best_tokens_of_the_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    medusa_logits = torch.randn(2, 1, 3, 30, generator=generator)
    logits = torch.randn(1, 3, 30, generator=generator)
    buffers = generate_medusa_buffers(SMALL)
    by_path, by_node = generate_candidates(medusa_logits, logits, buffers["tree_indices"], buffers["retrieve_indices"])
    root = int(logits[0, -1].argmax())
    first, second = (medusa_logits[i, 0, -1].sort(descending=True).indices.tolist() for i in (0, 1))
    assert by_node.tolist() == [[root, first[0], first[1], second[0], second[1]]]
    assert by_path.tolist() == [
        [root, first[0], second[1]],
        [root, first[0], second[0]],
        [root, first[1], -1],
    ]


@pytest.mark.parametrize("sampling", ["typical", "nucleus"])
def test_a_sampled_root_comes_from_what_the_rule_keeps(sampling: str) -> None:
    logits = torch.tensor([[[5.0, 4.0, -5.0, -5.0, -6.0, -7.0, -8.0, -9.0, -9.0, -9.0, -9.0]]])
    buffers, generator = generate_medusa_buffers(SMALL), torch.Generator().manual_seed(1)
    tensors = (torch.zeros(2, 1, 1, 11), logits, buffers["tree_indices"], buffers["retrieve_indices"], 1.0)
    draws = {
        int(generate_candidates(*tensors, sampling=sampling, generator=generator)[1][0, 0])  # type: ignore[arg-type]
        for _ in range(60)
    }
    assert draws == {0, 1}


def path_logits(best: list[list[int]], vocab: int = 4, sharpness: float = 8.0) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(best), vocab).float() * sharpness


def test_greedy_takes_the_path_that_agrees_longest() -> None:
    candidates = torch.tensor([[3, 1, 2], [3, 2, 2], [3, 2, 1]])
    logits = path_logits([[2, 0, 0], [2, 1, 3], [2, 1, 3]])
    best, length = evaluate_posterior(logits, candidates, 0.0)
    assert (int(best), int(length)) == (2, 2)
    nothing = evaluate_posterior(path_logits([[0, 0, 0]] * 3), candidates, 0.0)
    assert [int(x) for x in nothing] == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", ["typical", "nucleus"])
def test_padding_is_never_accepted(temperature: float, sampling: str) -> None:
    """Token 0 is the best after node 1. If padding counted as token 0, the short path would win."""
    candidates = torch.tensor([[3, 1, -1], [3, 2, 2]])
    logits = path_logits([[1, 0, 0], [1, 3, 0]], sharpness=40.0)
    best, length = evaluate_posterior(logits, candidates, temperature, sampling=sampling)  # type: ignore[arg-type]
    assert (int(best), int(length)) == (0, 1)


def test_typical_accepts_above_its_threshold_and_prefers_the_likelier_path() -> None:
    distribution = torch.tensor([0.5, 0.3, 0.15, 0.05])
    entropy = -(distribution * (distribution + 1e-5).log()).sum()
    logits = distribution.log().expand(3, 2, 4)
    candidates = torch.tensor([[0, 2], [0, 1], [0, 3]])
    for alpha in (0.1, 0.3, 0.6, 1.2, 2.0):
        threshold = min(0.4, alpha * float((-entropy).exp()))
        best, length = evaluate_posterior(logits, candidates, 1.0, 0.4, alpha)
        assert int(length) == int(threshold < 0.3)
        assert int(best) == (1 if threshold < 0.3 else 0)


def test_paths_share_the_draws_of_the_nodes_they_share() -> None:
    """Two paths with the same first node. With separate draws, one of them would be accepted in 3 of 4 cases."""
    logits = torch.zeros(2, 3, 2)
    candidates = torch.tensor([[0, 1, 0], [0, 1, 1]])
    generator, passed = torch.Generator().manual_seed(0), []
    for _ in range(2000):
        _, length = evaluate_posterior(logits, candidates, 1.0, sampling="nucleus", top_p=1.0, generator=generator)
        passed.append(int(length))
    assert abs(sum(length > 0 for length in passed) / 2000 - 0.5) < 0.05
    assert set(passed) == {0, 2}, "one child of the shared node is always drawn"
