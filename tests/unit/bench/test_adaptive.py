"""The comparison of adaptive with plain decoding: its loads, its statistics, its picture."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_tools.bench import adaptive, load
from eagle_tools.bench.demo import held_out
from eagle_tools.bench.load import Arrival, Measurement, TimedAnswer, Workload, answer_arrivals, ask
from eagle_tools.bench.report import equal_texts, percentile, plot_ratios, ratios, stream_times
from eagle_tools.bench.servers import BenchError, Server


def measurement(label: str, concurrency: int, seconds: float, *texts: str) -> Measurement:
    return Measurement(label, concurrency, seconds, 100, 0.1, 1.0, 10, {}, texts)


def test_ratios_and_equal_texts_compare_each_server_with_plain() -> None:
    rounds = [
        measurement("plain", 1, 2.0, "a", "b"),
        measurement("wide", 1, 1.0, "a", "b"),
        measurement("narrow", 1, 4.0, "a", "x"),
        measurement("plain", 1, 3.0, "a", "b"),
        measurement("wide", 1, 1.0, "a", "b"),
        measurement("narrow", 1, 3.0, "a", "b"),
    ]
    assert ratios(rounds, "wide") == {1: 2.5}
    assert ratios(rounds, "narrow") == {1: 0.75}
    assert equal_texts(rounds, "wide") == (4, 4)
    assert equal_texts(rounds, "narrow") == (3, 4)


def test_a_gap_of_several_tokens_counts_once_per_token() -> None:
    answers = [
        TimedAnswer(6, 1, 0, 1.0, first_token=0.5, text="", speculative=None, gaps=(0.4, 0.1), gap_tokens=(4, 1)),
        TimedAnswer(1, 1, 0, 0.7, first_token=0.7, text="", speculative=None, gaps=(), gap_tokens=()),
    ]
    assert answers[0].token_gaps == pytest.approx([0.1] * 5)
    times = stream_times(answers, 2.0)
    assert times["tokens/s"] == 3.5
    assert times["TTFT p99"] == pytest.approx(700)
    assert times["token gap p50"] == times["token gap p99"] == pytest.approx(100)
    assert times["event gap p99"] == pytest.approx(400)
    assert percentile([3, 1, 2], 0.5) == 2


def test_the_mixed_load_is_half_greedy_of_all_lengths_and_the_same_for_every_server() -> None:
    arrivals = adaptive.mixed_arrivals(64, rate=4.0, seed=1)
    assert arrivals == adaptive.mixed_arrivals(64, rate=4.0, seed=1)
    assert [a.temperature for a in arrivals].count(0.0) == 32
    lengths = [len(a.prompt) for a in arrivals]
    assert adaptive.SHORTEST <= min(lengths) < 30
    assert 800 < max(lengths) <= adaptive.LONGEST
    assert all(len(a.prompt) + a.max_tokens <= 1024 for a in arrivals)
    times = [a.seconds for a in arrivals]
    assert times == sorted(times)
    assert times[-1] / 63 == pytest.approx(1 / 4, rel=0.35)
    other = adaptive.mixed_arrivals(64, rate=math.inf, seed=2)
    assert {a.seconds for a in other} == {0.0}
    assert [a.prompt for a in other] == [a.prompt for a in arrivals]
    assert arrivals[1].prompt[-20:] == held_out(1)[0][-20:]


class Events(BaseHTTPRequestHandler):
    """Streams what a server would for max_tokens tokens: one event of a token, one of the others, one of none."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        last = body["max_tokens"]
        pieces = [("a", 1), ("b" * (last - 1), last - 1), ("", 0)]
        usage = {"prompt_tokens": 9, "completion_tokens": last, "prompt_tokens_details": {"cached_tokens": 4}}
        events = [{"choices": [{"text": text, "token_ids": [7] * count}], "usage": None} for text, count in pieces]
        events.append({"choices": [], "usage": usage, "metrics": {"speculative_decoding": {"x": 1}}})
        if body["max_tokens"] == 99:
            events = [{"error": {"message": "no"}}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def server() -> Iterator[tuple[Server, list[dict]]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Events) as http:
        http.bodies = []
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield Server("fake", http.server_port, None), http.bodies
        http.shutdown()
        thread.join()


def test_an_answer_knows_how_many_tokens_each_event_brought(server: tuple[Server, list[dict]]) -> None:
    answer = ask(server[0], [5, 6], Workload((), 5, 0.5, seed=3))
    assert (answer.text, answer.tokens, answer.gap_tokens) == ("abbbb", 5, (4,))
    assert len(answer.token_gaps) == 4
    assert answer.seconds >= answer.first_token > 0
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)
    assert answer.speculative == {"x": 1}
    [body] = server[1]
    assert (body["prompt"], body["temperature"], body["seed"]) == ([5, 6], 0.5, 3)


def test_arrivals_are_sent_at_their_times_with_their_own_parameters(server: tuple[Server, list[dict]]) -> None:
    arrivals = [Arrival(0.1 * number, [number], 2 + number, number / 2, 7 + number) for number in (0, 3, 1)]
    answers, seconds = answer_arrivals(server[0], arrivals)
    assert [answer.tokens for answer in answers] == [2, 5, 3]
    assert seconds >= 0.3
    assert [body["prompt"] for body in server[1]] == [[0], [1], [3]]
    assert [body["temperature"] for body in server[1]] == [0.0, 0.5, 1.5]
    with pytest.raises(BenchError, match="no"):
        answer_arrivals(server[0], [Arrival(0.0, [1], 99, 0.0, 0)])


def test_the_picture_of_ratios_is_written(tmp_path: Path) -> None:
    panel = {"adaptive": {1: 1.5, 8: 1.1}, "fixed": {1: 1.6, 8: 0.7}}
    curve = {"rows": [1, 2, 4], "ms": [5.0, 5.5, 7.0]}
    costs = {"verify": curve, "draft_extend": curve, "draft_step": curve, "speed": 1.1}
    plot_ratios(tmp_path / "out.png", {"temperature 0": panel, "temperature 1": panel}, costs, thick="adaptive")
    assert (tmp_path / "out.png").stat().st_size > 5000


def test_a_servers_flags_can_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: dict[str, list[str]] = {}

    def start(label: str, flags: list[str]) -> AbstractContextManager[None]:
        started[label] = flags
        if label == "mine":  # the last one
            raise BenchError("stop here")
        return nullcontext()

    monkeypatch.setattr(adaptive, "running", start)
    given = ["--server", "mine=--topk 1 --speculative-num-steps 2", "--server", "adaptive=--dtype float32"]
    assert adaptive.main(["--parts", "clients", "--out", str(tmp_path), *given]) == 2
    assert started["mine"] == ["--topk", "1", "--speculative-num-steps", "2", "--disable-radix-cache"]
    assert started["adaptive"] == ["--dtype", "float32", "--disable-radix-cache"]
    assert "NONE" in started["plain"]


@pytest.mark.deep
def test_every_fixed_tree_gives_the_plain_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = {label: adaptive.TREES[label] for label in ("fixed (3, 1, 4)", "fixed (3, 4, 13)")}
    monkeypatch.setattr(adaptive, "TREES", trees)
    arguments = ["--parts", "trees", "--prompts", "2", "--max-tokens", "16", "--out", str(tmp_path)]
    assert adaptive.main(arguments) == 0
    assert "answers of these trees that are plain's: 12 of 12" in capsys.readouterr().out
    found = json.loads((tmp_path / "adaptive.json").read_text())["tokens_per_forward"]
    assert list(found) == list(trees)
    assert all(by_temperature["0.0"] > 1 for by_temperature in found.values())


def test_stages_measured_in_some_cycles_stand_for_all() -> None:
    before: dict[str, Any] = {"cycles": 100, "measured_cycles": 10, "stage_seconds": {"verify": 1.0}}
    after = {"cycles": 420, "measured_cycles": 30, "stage_seconds": {"verify": 1.2, "prefill": 0.1}}
    server: Any = SimpleNamespace(label="plain", stats=lambda: after)
    found = load._summary(server, 1, 9.0, [], before)
    assert found.stage_seconds == pytest.approx({"verify": 3.2, "prefill": 1.6}) and found.cycles == 320
    assert load._summary(server, 1, 9.0, [], after).stage_seconds == {}
