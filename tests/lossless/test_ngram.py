"""N-gram drafting, alone and beside a head, changes no text: greedy, seeded, batched, preempted, resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from eagle_server.engine.assemble import assemble
from eagle_server.engine.engine import Engine
from eagle_server.engine.shape import Shape
from tests.lossless.conftest import Pair
from tests.lossless.test_equality import REQUESTS, SCENES, departure
from tests.lossless.test_flashinfer import SIZES, as_on_a_gpu
from tests.support.engines import CONTEXT, plain, run, tokens_of


def engine_of(pair: Pair, drafter: str, *, stand_ins: Mapping[str, Any] | None = None, **settings: Any) -> Engine:
    """NGRAM, or the pair's head with n-grams beside it. Freed slots are poisoned."""
    numbers: dict[str, Any] = {"context_length": CONTEXT, "max_total_tokens": 4096, "poison": True, "ngram_depth": 5}
    if drafter == "NGRAM":
        return assemble(pair.target, None, Shape(**{**numbers, "draft_token_num": 9, **settings}), **(stand_ins or {}))
    numbers |= {"num_steps": 3, "topk": 4, "draft_token_num": 12}
    return assemble(pair.target, pair.head, Shape(**{**numbers, **settings}), **(stand_ins or {}))


DRAFTERS = ("NGRAM", "head+NGRAM")


@pytest.fixture(scope="module")
def texts(pair: Pair) -> dict[str, list[int]]:
    return tokens_of(run(plain(pair.target), REQUESTS))


def check(pair: Pair, texts: Mapping[str, Sequence[int]], scene: str, build: Callable[..., Engine]) -> None:
    """A scene's texts are the plain ones, and drafts were accepted and refused."""
    engines: list[Engine] = []

    def kept(**settings: Any) -> Engine:
        engines.append(build(**settings))
        return engines[-1]

    outcome = SCENES[scene](kept)
    for name, finished in outcome.items():
        assert finished.tokens == texts[name], departure(pair, name, texts[name], finished.tokens)
    totals = [engine.stats() for engine in engines]
    assert 0 < sum(t.accepted_tokens for t in totals) < sum(t.drafted_tokens for t in totals)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ngrams_change_no_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], drafter: str, page: int, scene: str
) -> None:
    check(pair, texts, scene, lambda **settings: engine_of(pair, drafter, page_size=page, **settings))


@pytest.mark.parametrize(
    "shape",
    [
        {"num_steps": 6, "topk": 1, "draft_token_num": 4, "ngram_depth": 2},  # a chain deeper than the tries
        {"num_steps": 1, "topk": 2, "draft_token_num": 2, "ngram_depth": 8},  # one node for both
        {"num_steps": 1, "topk": 2, "draft_token_num": 40, "ngram_depth": 9},  # more than the head can fill
        {"num_steps": 4, "topk": 8, "draft_token_num": 6, "ngram_depth": 1},
    ],
    ids=str,
)
def test_any_shape_of_a_mixture_gives_the_same_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], shape: dict[str, int]
) -> None:
    engine = engine_of(pair, "head+NGRAM", chunk_tokens=5, **shape)
    assert tokens_of(run(engine, REQUESTS[:4], joining={3: REQUESTS[4:]})) == texts
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("modes", ["mask", "cascade"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_captured_cycles_on_flashinfer_give_the_plain_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], drafter: str, modes: str, scene: str
) -> None:
    chosen = {"verify_attention": modes, "draft_attention": modes, **as_on_a_gpu()}
    check(pair, texts, scene, lambda **settings: engine_of(pair, drafter, **chosen, **settings))


@pytest.mark.parametrize(("drafter", "stages"), [("NGRAM", 1), ("head+NGRAM", 4)])
def test_every_stage_is_captured_once_per_batch_size(pair: Pair, drafter: str, stages: int) -> None:
    engine = engine_of(pair, drafter, **as_on_a_gpu())
    run(engine, REQUESTS)
    assert len(engine.worker.verifier.graphs.keys) == stages * len(SIZES)


def test_a_mixture_learns_what_to_expect_of_its_drafters(pair: Pair) -> None:
    engine = engine_of(pair, "head+NGRAM")
    calibration = engine.worker.drafter.calibration  # type: ignore[attr-defined]
    run(engine, REQUESTS)
    assert calibration.expected.sum() > 10
    assert calibration.accepted.sum() > 0
