"""A request that asks for draft trees gets them, and they match its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields

from eagle_server.engine.engine import Engine
from eagle_server.request import Request, TokenDelta
from eagle_server.speculation.static_tree import parse_choices, ranks_of, steps_of
from eagle_server.worker import output_processing
from eagle_server.worker.host import HostCopy, _packed, _unpacked
from tests.lossless.drafters import UNEQUAL
from tests.support.engines import random_head, random_target, request, speculative
from tests.support.thinning import thinned

REPEATING = [3, 4, 5, 6] * 6


def engine(kind: str) -> Engine:
    target = random_target()
    if kind == "NGRAM":
        return speculative(target, None, 0, 1, nodes=9, ngram_steps=5)
    head = random_head(target, "EAGLE3")
    if kind == "EAGLE3":
        return speculative(target, head)
    if kind == "ragged EAGLE3":
        return thinned(speculative(target, head))
    choices = parse_choices(UNEQUAL)
    shape: dict[str, Any] = {"choices": choices, "nodes": len(choices) + 1}
    return speculative(target, head, steps_of(choices), ranks_of(choices), **shape)


def deltas(engine: Engine, requests: Sequence[Request]) -> list[TokenDelta]:
    for each in requests:
        engine.add(each)
    found = []
    while engine.has_work():
        found += engine.step()
    return found


def asked(name: str, **settings: Any) -> Request:
    return with_fields(request(name, REPEATING, ignore_eos=True, **settings), trees=True)


@pytest.mark.parametrize("kind", ["EAGLE3", "ragged EAGLE3", "static tree", "NGRAM"])
def test_accepted_path_and_bonus_are_the_tokens_of_the_delta(kind: str) -> None:
    requests = [asked("0"), asked("1", temperature=0.8), request("2", REPEATING, ignore_eos=True)]
    newest: dict[str, int] = {}
    drafted = accepted = 0
    for delta in deltas(engine(kind), requests):
        tree, first = delta.tree, delta.request_id not in newest
        assert (tree is None) == (first or delta.request_id == "2")
        if tree is not None:
            bonus = [] if tree.bonus is None else [tree.bonus]
            assert [tree.token_ids[node] for node in tree.path] + bonus == delta.token_ids
            assert tree.token_ids[0] == newest[delta.request_id]
            assert [tree.parents[node] for node in tree.path] == [0, *tree.path][: len(tree.path)]
            assert tree.parents[0] == -1
            assert all(parent < node for node, parent in enumerate(tree.parents))
            assert min(tree.token_ids) >= 0, "padding is left out"
            _check_scores(tree.scores, tree.parents)
            drafted, accepted = drafted + len(tree.token_ids) - 1, accepted + len(tree.path)
        newest[delta.request_id] = delta.token_ids[-1]
    assert 0 < accepted < drafted


def _check_scores(scores: list[float] | None, parents: list[int]) -> None:
    assert scores is not None
    assert scores[0] == 0
    assert all(scores[node] <= scores[parent] + 1e-5 for node, parent in enumerate(parents) if node)


def test_a_tree_has_its_drafted_levels_and_the_time_since_the_first_token() -> None:
    plain = with_fields(asked("plain"), speculative=False)
    found = deltas(
        thinned(speculative(target := random_target(), random_head(target, "EAGLE3"), 3, 2)), [plain, asked("0")]
    )
    for name, steps in (("plain", 0), ("0", 3)):
        own = [delta for delta in found if delta.request_id == name]
        trees = [delta.tree for delta in own if delta.tree is not None]
        left = [sum(len(delta.token_ids) for delta in own[number:]) for number in range(1, len(own))]
        assert [tree.steps for tree in trees] == [min(steps, each - 1) for each in left], "what could still be kept"
        seconds = [tree.seconds for tree in trees]
        assert seconds[0] > 0 and seconds == sorted(seconds)
    timing = found[-1].timing
    assert timing is not None
    assert timing.decode == pytest.approx(seconds[-1], abs=0.01)


def test_without_speculation_a_tree_is_its_root() -> None:
    plain = with_fields(asked("0"), speculative=False)
    trees = [delta.tree for delta in deltas(engine("EAGLE3"), [plain, asked("1")]) if delta.request_id == "0"]
    assert trees[0] is None
    assert all(tree is not None and tree.parents == [-1] and tree.path == [] for tree in trees[1:])


def test_nothing_is_copied_to_the_host_unless_a_request_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counted(*tensors: torch.Tensor) -> HostCopy:
        counts.append(len(tensors))
        return HostCopy(*tensors)

    monkeypatch.setattr(output_processing, "HostCopy", counted)
    deltas(engine("EAGLE3"), [request("0", REPEATING)])
    assert max(counts) == 4


@pytest.mark.parametrize(
    "values", [torch.tensor([[0.1, -2.5e-30], [float("-inf"), 3.0]]), torch.arange(-2, 2), torch.tensor([True, False])]
)
def test_values_of_every_dtype_are_copied_unchanged(values: torch.Tensor) -> None:
    (back,) = _unpacked(_packed([values]), [values])
    assert back.dtype == values.dtype
    assert torch.equal(back, values)
