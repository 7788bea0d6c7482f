"""Tests of mixtures with n-grams beyond `test_every_drafter`: more tree shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.worker.drafters.ngram import drafter as ngram_drafter
from tests.lossless.conftest import eagle_is_deep
from tests.lossless.pairs import Pair
from tests.lossless.scenes import REQUESTS
from tests.support.engines import plain, run, speculative, tokens_of

pytestmark = eagle_is_deep


def mixed(pair: Pair, **numbers: Any) -> Engine:
    """An engine with a mixture of the pair's head and n-grams."""
    return speculative(pair.target, pair.head, **{"nodes": 12, "ngram_steps": 5, **numbers})


def alone(pair: Pair, **numbers: Any) -> Engine:
    return plain(pair.target, **{"nodes": 12, "ngram_steps": 5, **numbers})


@pytest.mark.parametrize(
    "shape",
    [
        {"steps": 6, "topk": 1, "nodes": 4, "ngram_steps": 2},  # a chain deeper than the tries
        pytest.param(  # one node for both sources
            {"steps": 1, "topk": 2, "nodes": 2, "ngram_steps": 8}, marks=pytest.mark.deep
        ),
        {"steps": 1, "topk": 2, "nodes": 40, "ngram_steps": 9},  # more than the head can fill
        pytest.param({"steps": 4, "topk": 8, "nodes": 6, "ngram_steps": 1}, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_any_shape_of_a_mixture_gives_the_same_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], shape: dict[str, int]
) -> None:
    engine = mixed(pair, chunked_prefill_size=5, **shape)
    assert tokens_of(run(engine, REQUESTS[:4], joining={3: REQUESTS[4:]})) == texts
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize("build", [mixed, alone], ids=lambda build: build.__name__)
def test_texts_that_are_read_slowly_and_in_part_are_the_same(
    pair: Pair, texts: Mapping[str, Sequence[int]], build: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_PER_CYCLE": 3, "_GROWTH": 1, "_MOST": 24}.items():
        monkeypatch.setattr(ngram_drafter, name, value)
    engine = build(pair, chunked_prefill_size=5)
    assert tokens_of(run(engine, REQUESTS[:4], joining={3: REQUESTS[4:]})) == texts
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
