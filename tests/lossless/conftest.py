"""Fixtures: trained tiny pairs, their drafters and plain texts. The tensors are tiny, so tests run on one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from eagle_server.engine.engine import Engine
from tests.lossless import pairs as makers
from tests.lossless.drafters import CASES, Case
from tests.lossless.pairs import Pair, Pairs

KINDS = {"EAGLE": makers.eagle, "EAGLE3": makers.eagle3}
# Runs a test with both heads. The gate has only EAGLE3, because another test covers EAGLE.
eagle_is_deep = pytest.mark.parametrize(
    "pair", [pytest.param("EAGLE", marks=pytest.mark.deep), "EAGLE3"], indirect=True, scope="session"
)


@dataclass(frozen=True)
class Drafting:
    """One of CASES with its pair, and the texts of plain decoding for the scenes' requests."""

    case: Case
    pair: Pair
    texts: dict[str, list[int]]

    @property
    def drafts(self) -> bool:
        return bool(self.case.numbers["nodes"] > 1)

    def engine(self, **settings: Any) -> Engine:
        return self.case.engine(self.pair, **settings)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with _threads(1):
        yield


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with _threads(1):  # session fixtures run before `_one_thread`
        yield Pairs(shared / "pairs")


@pytest.fixture(scope="session", params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Pair:
    with _threads(1):
        return pairs.pair_of(KINDS[request.param])


@pytest.fixture
def texts(pairs: Pairs, pair: Pair) -> dict[str, list[int]]:
    """Outputs of plain decoding for the scenes' requests. None of their draws is a near-tie."""
    return pairs.texts(pair)


@pytest.fixture
def drafting(request: pytest.FixtureRequest, pairs: Pairs) -> Drafting:
    """A drafter by its name in CASES (indirect parametrization)."""
    case = CASES[request.param]
    pair = pairs.pair_of(case.maker)
    return Drafting(case, pair, pairs.texts(pair))
