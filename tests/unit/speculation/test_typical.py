"""Typical acceptance over trees: Medusa's rule over paths, greedy at temperature 0, and no excluded token accepted."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from eagle_server.api.generation.response_parts import SpeculativeMetrics
from eagle_server.plan import RequestSampling
from eagle_server.request import SpecStats
from eagle_server.speculation.accept import Lossless
from eagle_server.speculation.sampling import SamplingBatch
from eagle_server.speculation.static_tree import PRESETS, Choices, choice_parents
from eagle_server.speculation.tree import Tree, build_tree
from eagle_server.speculation.typical import Typical
from tests.support.reference import evaluate_posterior, generate_medusa_buffers
from tests.support.sampling import request_sampling
from tests.support.trees import tree_of

CPU, VOCAB = torch.device("cpu"), 12
TEMPERATURES = (0.3, 0.7, 1.0, 1.6, 0.0)
SMALL: Choices = ((0,), (0, 0), (0, 1), (1,), (1, 0), (0, 0, 0), (2,))


def settings(temperature: float, **other: object) -> RequestSampling:
    return request_sampling(**{"key": 1, "temperature": temperature, "top_k": 0, "top_p": 1.0, **other})  # type: ignore[arg-type]


def random_tree(choices: Choices, requests: int, generator: torch.Generator) -> Tree:
    """A tree with random tokens; siblings differ. A node's rank selects from a random permutation for its depth."""
    nodes = generate_medusa_buffers(choices)["sorted_medusa_choices"]
    depths = [len(node) - 1 for node in nodes]
    tokens = torch.rand(requests, max(depths) + 1, VOCAB, generator=generator).argsort(-1)
    picked = tokens[:, depths, [node[-1] for node in nodes]]
    parents = torch.tensor([choice_parents(choices)]).expand(requests, -1)
    roots, seq_lens = torch.zeros(requests, dtype=torch.int64), torch.full((requests,), 9)
    return build_tree(roots, seq_lens, picked, parents, max(depths) + 1)


@pytest.mark.parametrize("choices", [SMALL, PRESETS["mc_sim_7b_63"]], ids=["small", "published"])
@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.3, 0.09), (0.02, 0.9)])
def test_a_tree_is_walked_as_its_paths_are_judged(choices: Choices, threshold: float, alpha: float) -> None:
    generator = torch.Generator().manual_seed(len(choices))
    paths, rule, lengths = generate_medusa_buffers(choices)["retrieve_indices"], Typical(threshold, alpha), set[int]()
    sampling = SamplingBatch.of([settings(t) for t in TEMPERATURES], CPU)
    for _ in range(25):
        tree = random_tree(choices, len(TEMPERATURES), generator)
        logits = 2 * torch.randn(tree.tokens.numel(), VOCAB, generator=generator)
        accepted, plain = rule.accept(tree, logits, sampling), Lossless().accept(tree, logits, sampling)
        for i, temperature in enumerate(TEMPERATURES):
            own, length = logits.view(len(TEMPERATURES), -1, VOCAB)[i], int(accepted.accept_length[i])
            by_path = torch.where(paths < 0, -1, tree.tokens[i][paths.clamp(min=0)])
            best, expected = evaluate_posterior(own[paths.clamp(min=0)], by_path, temperature, threshold, alpha)
            path = paths[best][: length + 1].tolist()
            assert length == int(expected)
            assert accepted.path[i].tolist() == path + [-1] * (tree.steps - length)
            assert accepted.tokens[i, :length].tolist() == by_path[best][1 : length + 1].tolist()
            lengths.add(length)
        for typical, lossless in zip(fields(accepted, -1), fields(plain, -1), strict=True):
            assert torch.equal(typical, lossless), "temperature 0"
    assert lengths >= {0, 1, 2}


def fields(accepted: object, request: int) -> list[Tensor]:
    return [getattr(accepted, name)[request] for name in ("path", "accept_length", "tokens", "drafted", "finite")]


def test_the_bonus_is_the_targets_own_draw_at_the_last_node() -> None:
    tree = random_tree(((0,),), 1, torch.Generator().manual_seed(0))
    token, sampling = int(tree.tokens[0, 1]), SamplingBatch.of([settings(1.0)], CPU)
    logits = torch.zeros(2, VOCAB)
    logits[0, token], logits[1, 5] = 3.0, 30.0
    accepted = Typical(0.09, 0.3).accept(tree, logits, sampling)
    assert accepted.tokens.tolist() == [[token, 5]]
    refused = Typical(0.9, 5.0).accept(tree, logits, sampling)
    drawn = Lossless().accept(tree, logits, sampling).tokens[0, 0]
    assert refused.accept_length.tolist() == [0]
    assert refused.tokens.tolist() == [[int(drawn), -1]]


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 0.3}, {"stop_ids": (3,), "allowed_from": 99}], ids=str)
def test_what_the_transforms_exclude_is_never_accepted(limits: dict[str, object]) -> None:
    """Token 3 is the second best, or the best if a limit forbids it by id. Without limits it is accepted."""
    tree = tree_of([[-1, 0]], [[0, 3]], [9], 1)
    logits = torch.zeros(2, VOCAB)
    logits[:, 2], logits[:, 3] = 4.0, 5.0 if "stop_ids" in limits else 3.5
    for temperature in (0.5, 1.0):
        free, bound = (
            Typical(0.09, 0.3).accept(tree, logits, SamplingBatch.of([settings(temperature, **each)], CPU))
            for each in ({}, limits)
        )
        assert free.accept_length.tolist() == [1]
        assert bound.accept_length.tolist() == [0]
        assert 3 not in bound.tokens[0]


def test_padding_is_never_accepted_and_a_row_that_is_not_finite_fails_its_request() -> None:
    tree = tree_of([[-1, 0, 0]] * 2, [[0, -1, -1], [0, 4, -1]], [9, 9], 1)
    logits = torch.zeros(6, VOCAB)
    logits[4] = torch.nan
    accepted = Typical(0.01, 0.01).accept(tree, logits, SamplingBatch.of([settings(1.0)] * 2, CPU))
    assert accepted.accept_length.tolist() == [0, 1]
    assert accepted.drafted.tolist() == [0, 1]
    assert accepted.finite.tolist() == [True, False]


def test_answers_name_the_rule_only_where_it_was_lossy() -> None:
    for lossy in (None, "typical"):
        metrics = msgspec.to_builtins(SpeculativeMetrics.of(SpecStats(histogram=[1, 1], drafted=3, lossy=lossy)))
        assert metrics.get("acceptance") == lossy
