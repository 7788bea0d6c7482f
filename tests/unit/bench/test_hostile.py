"""The report about a neighbour beside attacks: what counts as an effect, and that the loads are what they say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from eagle_server.api.schemas.base import parse
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_tools.bench import hostile
from eagle_tools.bench.attacks import LOADS
from eagle_tools.bench.hostile import SERVERS, Effect, Phase, effects_of

ATTACK, BASELINE = "schema: 45 objects deep", "plain"


def effect(attack: list[Phase], baseline: list[Phase]) -> Effect:
    return next(each for each in effects_of({BASELINE: baseline, ATTACK: attack}) if each.name == ATTACK)


def test_an_attack_may_double_the_99th_percentile_with_50_milliseconds_more_and_no_more() -> None:
    usual = [Phase([0.1] * 9 + [0.2])] * 3
    doubled = effect([Phase([0.1] * 9 + [0.44])] * 3, usual)
    assert (doubled.ratio, doubled.verdict) == (pytest.approx(2.2), "ok")
    assert effect([Phase([0.1] * 9 + [0.46])] * 3, usual).verdict == "slower than 2 x + 50 ms"


def test_one_slow_phase_of_three_is_the_machines_and_two_are_the_attacks() -> None:
    usual, slow = Phase([0.1] * 10), Phase([0.1] * 9 + [5.0])
    assert effect([usual, slow, usual], [usual] * 3).verdict == "ok"
    assert effect([slow, slow, usual], [usual] * 3).verdict == "slower than 2 x + 50 ms"


def test_a_fault_in_one_phase_is_enough() -> None:
    usual = Phase([0.1] * 10, others=Counter({"400": 3}))
    broken = Phase([0.1] * 10, faults=["status 500"], others=Counter({"500": 1}))
    found = effect([usual, broken], [usual])
    assert found.verdict == "status 500"
    assert found.others == {"400": 3, "500": 1}


def test_every_attack_has_a_baseline_and_a_server() -> None:
    for name, load in LOADS.items():
        assert load.server in SERVERS
        if load.baseline is not None:
            assert LOADS[load.baseline].baseline is None, name


def test_baselines_are_ordinary_requests_that_differ() -> None:
    for name, load in LOADS.items():
        if load.baseline is None:
            first, second = (json.dumps(load.body(number)).encode() for number in (1, 2))
            assert parse(CompletionRequest, first).sequences >= 1, name
            assert first != second, name


@pytest.mark.deep
def test_an_attack_on_the_demo_is_reported(tmp_path: Path) -> None:
    name = "body: 4M brackets"
    hostile.main(["--only", name, "--rounds", "1", "--seconds", "1", "--out", str(tmp_path)])
    rows = {each["name"]: each for each in json.loads((tmp_path / "hostile.json").read_text())}
    assert rows.keys() == {"nothing", name}
    assert rows[name]["faults"] == []
    assert set(rows[name]["others"]) == {"400"}
    assert rows[name]["answers"] >= 2
