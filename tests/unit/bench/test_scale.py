"""The comparison of one server with several behind a router: what its numbers mean, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_tools.bench import scale
from eagle_tools.bench.load import TimedAnswer
from eagle_tools.bench.routers import is_installed


def test_the_numbers_of_a_pass() -> None:
    answers = tuple(
        TimedAnswer(8, 100, 25 * number, seconds, seconds / 10, "", None, (), ())
        for number, seconds in enumerate((1.0, 2.0, 4.0))
    )
    numbers = scale.Pass(6.0, answers, (0.75, 0.25)).numbers
    assert numbers["tokens/s"] == 4
    assert numbers["latency p50"] == pytest.approx(2000)
    assert numbers["latency p99"] == pytest.approx(4000)
    assert numbers["TTFT p50"] == pytest.approx(200)
    assert numbers["cached"] == 0.25
    assert numbers["busiest worker"] == 0.75


def test_conversations_of_a_group_begin_alike_and_rounds_do_not() -> None:
    first, second = (scale.openings(6, 3, turn) for turn in (0, 1))
    assert len({*first, *second}) == 12
    assert [text[:100] for text in first[:3]] == [text[:100] for text in first[3:]]
    assert len({text[:12] for text in (*first, *second)}) == 6


def test_a_router_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eagle_tools.bench.routers.is_installed", lambda _: False)
    assert scale.main(["--routers", "vllm-router"]) == 2
    assert capsys.readouterr().err == "scale: vllm-router is not installed: pip install -e '.[routers]'\n"


@pytest.mark.deep
@pytest.mark.skipif(not is_installed("vllm-router"), reason="needs vllm-router: pip install -e '.[routers]'")
def test_workers_behind_a_router_give_the_texts_of_one_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [
        "--workers",
        "2",
        "--rounds",
        "1",
        "--conversations",
        "4",
        "--clients",
        "4",
        "--groups",
        "2",
        "--max-tokens",
        "8",
    ]
    flags = ["--speculative-algorithm", "NONE"]
    assert scale.main(["--routers", "vllm-router", "--out", str(tmp_path), *short, "--", *flags]) == 0
    assert "24 of 24" in capsys.readouterr().out
    medians = json.loads((tmp_path / "scale.json").read_text())["medians"]
    assert medians.keys() == {"1 server", "2 behind vllm-router"}
    assert medians["2 behind vllm-router"]["cached"] > 0.3
    assert (tmp_path / "scale.png").stat().st_size > 5000
