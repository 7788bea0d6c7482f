"""Evaluation of a served head: the server's own histograms, with drafts and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_tools import DEMO
from eagle_tools.training.__main__ import main
from eagle_tools.training.rows.evaluation import AcceptCounts
from tests.unit.training.test_regenerate import answer, chats, server


def test_lengths_and_rates_follow_from_the_histogram() -> None:
    counts = AcceptCounts(30, 2.0, (2, 1, 0, 1))
    assert counts.accept_length == 1 + 4 / 4
    assert counts.by_position == [0.5, 0.25, 0.25]
    assert counts.speed == 15
    both = counts.with_other(AcceptCounts(10, 2.0, (0, 4), answers=1, failed=2))
    assert both == AcceptCounts(40, 4.0, [2, 5, 0, 1], 1, 2)
    assert AcceptCounts(0, 0.0).accept_length == AcceptCounts(0, 0.0).speed == 0


def test_each_data_set_is_measured_with_drafts_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain: list[bool] = []

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if body["max_tokens"] == 7:  # not the first answer, which is not measured
            plain.append(body.get("speculative") is False)
        if body["messages"][0]["content"] == "0 0":
            return 400, {"error": {"message": "no"}}
        status, values = answer(body, number)
        drafts = None if plain and plain[-1] else {"acceptance_histogram": [1, 2, 1]}
        return status, values | {"metrics": {"speculative_decoding": drafts}}

    data = [chats(tmp_path / "a.jsonl", 3), chats(tmp_path / "b.jsonl", 1)]
    with server(reply) as url:
        command = ["evaluate", "--url", url, "--data", *map(str, data), "--max-tokens", "7"]
        assert main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main([*command, "--no-plain"]) == 0
        lines = capsys.readouterr().out.splitlines()
    assert [each["name"] for each in found["data"]] == ["a.jsonl", "b.jsonl", "together"]
    first, second, together = found["data"]
    assert (first["conversations"], first["answers"], first["failed"]) == (3, 5, 1)  # 2 and 3 questions
    assert first["acceptance_histogram"] == [5, 10, 5] and first["accept_length"] == 2.0
    assert first["acceptance_by_position"] == [0.75, 0.25]
    assert second["failed"] == 1 and second["speedup"] is None
    assert together["tokens"] == first["tokens"] > 0 and together["plain_tokens_per_second"] > 0
    assert sum(plain) == 7  # one request for each question that is asked, in the first command
    assert len(lines) == 4 and "2.000" in lines[1] and lines[1].endswith("75 % 25 %  (1 failed)")


@pytest.mark.parametrize("given", [[], ["--target", "x"], ["--target", "x", "--head", "y", "--url", "z"]])
def test_a_head_or_a_server_is_named(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--data", str(chats(tmp_path / "a.jsonl")), *given]) == 2
    assert "give --target and --head to be served, or the --url" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demos_head_is_served_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "def fibonacci(n):"}\n')
    pair = ["--target", str(DEMO / "target"), "--head", str(DEMO / "eagle3")]
    command = ["evaluate", *pair, "--data", str(data), "--max-tokens", "24", "--json"]
    assert main([*command, "--serve=--no-such-flag"]) == 2
    assert "ended with status 2" in capsys.readouterr().err
    assert main(command) == 0
    [found] = json.loads(capsys.readouterr().out)["data"]
    assert found["tokens"] == 24 and found["plain_tokens_per_second"] > 0
    cycles = sum(found["acceptance_histogram"])
    accepted = sum(a * count for a, count in enumerate(found["acceptance_histogram"]))
    assert found["accept_length"] == round(1 + accepted / cycles, 4) > 1
