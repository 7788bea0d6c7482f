"""The demo's text is the same with each of its drafters, chosen by options."""

from __future__ import annotations

import pytest

from eagle_server.config import parse_args
from eagle_server.engine.assembly.from_config import build_engine
from tests.support.engines import FIXED_TREES, request, run, tokens_of


def answers(algorithm: str) -> tuple[dict[str, list[int]], str, int]:
    flags = ("--speculative-algorithm", algorithm, "--max-total-tokens", "2048", "--max-running-requests", "4")
    fixed = () if algorithm == "NONE" else FIXED_TREES
    engine = build_engine(parse_args((*flags, "--cpu-threads", "1", *fixed), {}), progress=False)
    requests = [request(i, range(40 + 3 * i, 60 + 3 * i), ignore_eos=True, max_tokens=40) for i in range(2)]
    outcome = tokens_of(run(engine, requests))
    return outcome, engine.ready().speculative_algorithm, engine.stats().accepted_tokens


@pytest.mark.slow
def test_the_demo_with_any_drafter_writes_the_plain_text() -> None:
    plain, name, _ = answers("NONE")
    assert name == "NONE"
    for algorithm in (
        "MEDUSA",
        "REDRAFTER",
        "DFLASH",
        "NGRAM",
        "EAGLE3+NGRAM",
        "MEDUSA+NGRAM",
        "REDRAFTER+NGRAM",
        "DFLASH+NGRAM",
    ):
        outcome, name, accepted = answers(algorithm)
        assert outcome == plain
        assert name == algorithm
        assert accepted > 0
