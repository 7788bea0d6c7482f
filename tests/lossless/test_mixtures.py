"""MEDUSA+NGRAM and REDRAFTER+NGRAM change no text, whatever they share, and as on a GPU with replayed graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_server.engine.engine import Engine
from eagle_server.models.target import TargetModel
from eagle_server.speculation.medusa_choices import PRESETS, truncated
from tests.lossless.test_equality import REQUESTS, SCENES
from tests.lossless.test_flashinfer import as_on_a_gpu
from tests.support.engines import plain, random_target, run, speculative, tokens_of
from tests.support.redrafter import random_redrafter
from tests.support.scoring import NEAR_TIE, in_float64, slack
from tests.unit.test_no_host_sync import random_medusa

CHOICES = truncated(PRESETS["mc_sim_7b_63"], 3)
MIXTURES: dict[str, dict[str, Any]] = {
    "MEDUSA+NGRAM": {"choices": CHOICES, "draft_token_num": len(CHOICES) + 1},
    "MEDUSA+NGRAM, few nodes": {"choices": CHOICES, "draft_token_num": 6, "ngram_share_tokens": 300},
    "REDRAFTER+NGRAM": {"draft_token_num": 13, "ngram_share_tokens": 300},
    "REDRAFTER+NGRAM, many nodes": {"draft_token_num": 30},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    torch.set_num_threads(1)
    return random_target(vocab=64)


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> dict[str, list[int]]:
    """The plain outputs; none of their draws is a near-tie."""
    outcome, exact = run(plain(target), REQUESTS), in_float64(target)
    assert min(slack(exact, each, outcome[each.request_id].tokens) for each in REQUESTS) > NEAR_TIE
    return tokens_of(outcome)


def engine_of(target: TargetModel, mixture: str, **settings: Any) -> Engine:
    head: Any = random_medusa(target) if mixture.startswith("MEDUSA") else random_redrafter(target)
    return speculative(
        target, head, 3, 10 if "MEDUSA" in mixture else 4, ngram_depth=5, **MIXTURES[mixture], **settings
    )


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("on", ["cpu", "as on a gpu"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures_change_no_text(
    target: TargetModel, texts: dict[str, list[int]], mixture: str, on: str, scene: str
) -> None:
    engines: list[Engine] = []

    def build(**settings: Any) -> Engine:
        places = {"page_size": 16} if on == "cpu" else as_on_a_gpu()
        engines.append(engine_of(target, mixture, **places, **settings))
        return engines[-1]

    for name, finished in SCENES[scene](build).items():
        assert finished.tokens == texts[name]
    totals = [engine.stats() for engine in engines]
    assert 0 < sum(t.accepted_tokens for t in totals) < sum(t.drafted_tokens for t in totals)


@pytest.mark.parametrize("mixture", ["MEDUSA+NGRAM", "REDRAFTER+NGRAM"])
def test_both_sources_are_judged(target: TargetModel, mixture: str) -> None:
    """The calibration has bins where the head alone, the tries alone and both guessed."""
    engine = engine_of(target, mixture)
    run(engine, REQUESTS)
    said = engine.worker.drafter.calibration.expected.view(3, 7, 7).sum(0) > 0  # type: ignore[attr-defined]
    assert said[2:, :2].any(), "the head alone"
    assert said[:2, 2:].any(), "the tries alone"
