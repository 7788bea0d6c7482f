"""Greedy text is the same with and without speculation, up to the tie rule (tests/gpu/ties.py). Uses the demo pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from eagle_server.request import Request
from eagle_tools.bench.padding import PaddedShape, pad_demo
from tests.gpu.conftest import flashinfer_on
from tests.gpu.pairs import Pair, demo_pair, demo_requests
from tests.gpu.ties import MARGIN, judge
from tests.support.engines import run, tokens_of

TREES = [
    {"steps": 3, "topk": 4, "nodes": 13},
    {"steps": 6, "topk": 8, "nodes": 64},
    {"steps": 4, "topk": 1, "nodes": 5},
]
NAMES = ["13 nodes", "64 nodes", "chain"]


def requests_on(device: torch.device) -> list[Request]:
    """Few requests on the CPU, which only check the test itself."""
    return demo_requests(16, 48) if device.type == "cuda" else demo_requests(2, 8)


def texts(pair: Pair, asked: Sequence[Request], **settings: Any) -> dict[str, list[int]]:
    engine = pair.engine(context_length=512, max_total_tokens=8192, max_running_requests=8, **settings)
    outcome = tokens_of(run(engine, asked))
    totals = engine.stats()
    assert not settings.get("steps") or 0 < totals.accepted_tokens < totals.drafted_tokens
    return outcome


def check(pair: Pair, asked: Sequence[Request], plain: dict[str, list[int]], fast: dict[str, list[int]]) -> None:
    verdict = judge(pair.target, asked, plain, fast, MARGIN[pair.dtype])
    assert not verdict.wrong, str(verdict)
    everything = sum(map(len, plain.values()))
    assert verdict.compared > everything / 2, f"too little of {everything} was compared: {verdict}"
    assert verdict.near_ties < everything / 5, f"ties excuse too much: {verdict}"


@pytest.fixture(scope="module")
def exact(module_device: torch.device) -> Pair:
    return demo_pair(module_device)


@pytest.fixture(scope="module")
def exact_texts(exact: Pair, module_device: torch.device) -> dict[str, list[int]]:
    return texts(exact, requests_on(module_device))


@pytest.mark.parametrize("tree", TREES, ids=NAMES)
def test_in_float32(
    exact: Pair, exact_texts: dict[str, list[int]], module_device: torch.device, tree: dict[str, int]
) -> None:
    asked = requests_on(module_device)
    check(exact, asked, exact_texts, texts(exact, asked, **tree))


@pytest.fixture(scope="module")
def padded(module_device: torch.device) -> Pair:
    """The demo pair made wider, with head size 128 for FlashInfer's modules. float32 on the CPU, which is faster."""
    dtype = torch.bfloat16 if module_device.type == "cuda" else torch.float32
    return Pair(*pad_demo(PaddedShape.tiny(), device=module_device, dtype=dtype, context=1024))


@pytest.fixture(scope="module")
def served(module_device: torch.device) -> dict[str, Any]:
    """Engine settings: FlashInfer and CUDA graphs on a GPU, neither on the CPU."""
    if module_device.type == "cpu":
        return {}
    flashinfer_on(module_device)
    return {"backend": "flashinfer", "graph_sizes": (1, 2, 4, 8)}


@pytest.fixture(scope="module")
def padded_texts(padded: Pair, served: dict[str, Any], module_device: torch.device) -> dict[str, list[int]]:
    return texts(padded, requests_on(module_device), **served)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES, ids=NAMES)
def test_in_bfloat16(
    padded: Pair,
    padded_texts: dict[str, list[int]],
    served: dict[str, Any],
    module_device: torch.device,
    tree: dict[str, int],
) -> None:
    asked = requests_on(module_device)
    check(padded, asked, padded_texts, texts(padded, asked, **tree, **served))


@pytest.mark.slow
def test_a_departure_away_from_a_tie_is_noticed(padded: Pair, padded_texts: dict[str, list[int]]) -> None:
    asked = requests_on(padded.target.embed.device)
    wrong = {name: [*text[:5], (text[5] + 1) % 4096, *text[6:]] for name, text in padded_texts.items()}
    verdict = judge(padded.target, asked, padded_texts, wrong, MARGIN[padded.dtype])
    assert len(verdict.wrong) + len(verdict.excused) == len(asked)
    assert len(verdict.wrong) > len(asked) / 2
