"""The GPU benchmark: its parts on a CPU at tiny shapes, its report, and parts that fail."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_tools.bench.gpu import __main__ as gpu
from eagle_tools.bench.gpu.child_command import ChildCommand
from eagle_tools.bench.gpu.report import markdown, plot
from eagle_tools.bench.gpu.suite import counts, run_suite


@pytest.mark.long
@pytest.mark.deep
@pytest.mark.timeout(600)
def test_tiny_shapes_on_a_cpu_give_a_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["floor", "decode", "stages", "served", "peer", "mla", "products"]
    arguments = ["--tiny", "--device", "cpu", "--no-tests", "--build", "--out", str(tmp_path), "--parts", *parts]
    assert gpu.main(arguments) == 0, capsys.readouterr().out
    document = json.loads((tmp_path / "gpu.json").read_text())
    statuses = {name: part["status"] for name, part in document["parts"].items()}
    assert statuses == dict.fromkeys(["build", *parts], "ok")
    decode, stages, peer = (document["parts"][name]["result"] for name in ("decode", "stages", "peer"))
    assert [goal["name"] for goal in decode["goals"]] == ["plain step / floor", "cycle / plain step"]
    assert [goal["name"] for goal in stages["goals"]] == ["verify / plain step"]
    assert decode["speculative"]["tokens_per_cycle"] > 1 == decode["plain"]["tokens_per_cycle"]
    assert list(stages["speculative"]["ms"])[:4] == ["extend", "propose", "build_tree", "verify"]
    assert decode["tokens_alike"] == decode["tokens_compared"] > 0
    served = document["parts"]["served"]["result"]
    assert [row["clients"] for row in served["speculative"]] == [row["clients"] for row in served["plain"]] == [1, 2, 2]
    assert all(row["tokens_per_second"] > 0 for rows in served.values() for row in rows)
    assert peer["plain_tokens_alike"] == peer["speculative_tokens_alike"] == peer["tokens"], "transformers differs"
    assert all(row["tree of 64"]["device_ms"] > 0 for row in document["parts"]["mla"]["result"]["rows"])
    assert all(row["plain"] > 0 for row in document["parts"]["products"]["result"]["rows"])
    assert "**missed**" in capsys.readouterr().out
    assert (tmp_path / "gpu.png").stat().st_size > 5000


def pace(ms: float, tokens: float) -> dict[str, Any]:
    return {
        "batch": 1,
        "cycles": 3,
        "cycle_ms": ms,
        "tokens_per_second": 1e3 * tokens / ms,
        "tokens_per_cycle": tokens,
    }


def kernels(verify: float, cycle: float) -> dict[str, Any]:
    return {
        "total_ms": verify + 0.1,
        "ms": {"verify": verify, "accept": 0.1},
        "kernels": {"verify": 410.0, "accept": 30.0},
        "top": [{"kernel": "gemm", "ms": 1.0, "calls": 3.0, "share": 0.25}],
        "cycle_ms": cycle,
    }


def document(**parts: dict[str, Any]) -> dict[str, Any]:
    return {"began": "now", "settings": {"tiny": False}, "machine": {"device": "a GPU", "versions": {}}, "parts": parts}


def test_a_report_names_missed_goals_and_what_was_not_measured(tmp_path: Path) -> None:
    goals = [
        {"name": "plain step / floor", "measured": 1.3, "goal": 1.15, "met": False},
        {"name": "cycle / plain step", "measured": 1.4, "goal": 1.40, "met": True},
    ]
    decode = {
        "plain": pace(4.0, 1.0),
        "speculative": pace(5.6, 4.4),
        "floor_ms": 3.1,
        "speedup": 3.1,
        "tokens_compared": 9,
        "tokens_alike": 9,
        "goals": goals,
    }
    missed = {"name": "verify / plain step", "measured": 1.25, "goal": 1.2, "met": False}
    stages = {"plain": kernels(3.9, 4.0), "speculative": kernels(4.9, 5.6), "goals": [missed]}
    rows = [
        {
            **{"batch": n, "plain": pace(4.0, n), "adaptive": pace(5.0, 4 * n), "chosen": "chain of 5"},
            **({} if n == 64 else {"one size": pace(6.0, 4 * n)}),
        }
        for n in (1, 2, 64)
    ]
    series = {"1024": 4.0, "32768": 5.0}
    ways = {
        name: {"verify": verify, "draft": draft, "verify_ms": series, "propose_ms": series, "cycle_ms": series}
        for name, verify, draft in (("mask", "mask", "mask"), ("per_node", "cascade", "per_node"))
    }
    results = {
        "build": {"seconds": {"the padded demo": 181.0}},
        "decode": decode,
        "stages": stages,
        "batches": {"rows": rows},
        "contexts": {"contexts": [1024, 32768], "step_ms": series, "floor_ms": series},
        **ways,
        "mla": {
            "heads": 128,
            "rank": 512,
            "rope": 64,
            "rows": [{"context": 1, "kv_mb": 1, "decode": {"failed": "none"}}],
        },
    }
    whole = document(
        **{name: {"status": "ok", "result": result} for name, result in results.items()},
        peer={"status": "failed", "reason": "ImportError: no transformers"},
        cascade={"status": "skipped", "reason": "the time budget is spent"},
    )
    whole["tests"] = {"status": "ok", "passed": 3, "failed": 1, "skipped": 0, "failures": ["x::y - z"], "skips": []}
    text = markdown(whole)
    assert "| plain step / floor | 1.300 | 1.15 | **missed** |" in text
    assert "| cycle / plain step | 1.400 | 1.40 |  |" in text
    assert "- peer: failed, ImportError: no transformers" in text
    assert "- cascade: skipped, the time budget is spent" in text
    assert "| verify | 3.900 | 410 | 4.900 | 410 |" in text
    assert "| cycle, cascade and per_node | 4.000 | 5.000 |" in text
    assert "the padded demo 181 s" in text
    assert "3 passed, 1 failed" in text and "x::y - z" in text
    summary = text[text.index("| a GPU, Llama") :].partition("\n\n")[0]
    assert "| 1 request, tokens/s | 250 | 800 | 3.20 x |" in summary and "| 64 requests, tokens/s |" in summary
    assert "| 2 | 500 | 1600 (3.20 x) | 1333 (2.67 x) | chain of 5 | 1.20 |" in text
    assert "| 64 | 16000 | 51200 (3.20 x) |  | chain of 5 | 3.20 |" in text, "there was no time for the rest"
    assert "| 2 | 4.00 (2.00) | 5.00 (8.00) | 6.00 (8.00) |" in text
    assert len(summary.splitlines()) < 10 and max(map(len, summary.splitlines())) < 80, "it is for a README"
    plot(tmp_path / "all.png", whole)
    assert (tmp_path / "all.png").stat().st_size > 5000


def test_a_summary_prefers_what_is_served() -> None:
    rates = {"plain": (100.0, 700.0, 600.0), "speculative": (310.0, 910.0, 720.0)}
    served = {
        name: [
            {"clients": clients, "mixed": mixed, "tokens_per_second": rate}
            for clients, mixed, rate in zip((1, 8, 8), (False, False, True), found, strict=True)
        ]
        for name, found in rates.items()
    }
    text = markdown(document(served={"status": "ok", "result": served}))
    assert "| 1 client, tokens/s | 100 | 310 | 3.10 x |" in text, "the summary"
    assert "| 8 clients | 700 | 910 | 1.30 x |" in text, "its own table"
    assert "| 8 clients, mixed prompts | 600 | 720 | 1.20 x |" in text


def test_a_report_of_nothing_is_a_report(tmp_path: Path) -> None:
    nothing = document(floor={"status": "failed", "reason": "no GPU"}) | {"machine": {}}
    assert "- floor: failed, no GPU" in markdown(nothing)
    plot(tmp_path / "none.png", nothing)
    assert not (tmp_path / "none.png").exists()


CHILD = """
import json, os, sys, time
order = json.loads(sys.argv[1])
path, name = order["file"], order["part"]
known = json.load(open(path)) if os.path.exists(path) else {}
known[name] = {"status": "running"}
json.dump(known, open(path, "w"))
if name == "decode": os._exit(77)
if name == "mla": time.sleep(60)
known[name] = {"status": "ok", "result": {}}
json.dump(known, open(path, "w"))
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def runs(program: str) -> None:
        def argv(order: ChildCommand) -> list[str]:
            return [sys.executable, "-c", program, json.dumps(vars(order))]

        monkeypatch.setattr(ChildCommand, "argv", argv)

    return runs


def measured(folder: Path, names: list[str], seconds: float) -> dict[str, Any]:
    parts = gpu.Parts(folder / "parts.json", "cpu", tiny=True)
    for name in names:
        parts.measure(name, time.time() + seconds)
    return parts.known


def test_a_part_that_kills_its_process_costs_only_itself(tmp_path: Path, child: Callable[[str], None]) -> None:
    child(CHILD)
    known = measured(tmp_path, ["floor", "decode", "peer"], 30)
    assert {name: part["status"] for name, part in known.items()} == {"floor": "ok", "decode": "failed", "peer": "ok"}
    assert "status 77" in known["decode"]["reason"]


STARTS_A_SERVER = """
import json, subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
json.dump({"served": {"status": "running", "server": server.pid}}, open(json.loads(sys.argv[1])["file"], "w"))
time.sleep(60)
"""


@pytest.mark.deep
def test_a_server_does_not_outlive_the_part_that_started_it(
    tmp_path: Path, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child(STARTS_A_SERVER)
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    monkeypatch.setattr(gpu.Path, "write_text", lambda *_: 0)  # the server's number stays in the file
    measured(tmp_path, ["served"], 5)
    server = json.loads((tmp_path / "parts.json").read_text())["served"]["server"]
    state, deadline = Path(f"/proc/{server}/stat"), time.monotonic() + 20  # it would sleep for longer
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.deep
def test_a_part_that_hangs_is_ended_with_the_budget(
    tmp_path: Path, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child(CHILD)
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    assert measured(tmp_path, ["floor"], 60)["floor"]["status"] == "ok"
    known = measured(tmp_path, ["mla"], 2)
    assert known["mla"] == {"status": "failed", "reason": "still running when the time budget was spent"}


def test_a_process_that_cannot_start_fails_its_part(tmp_path: Path, child: Callable[[str], None]) -> None:
    child("raise SystemExit(5)")
    known = measured(tmp_path, ["floor", "mla"], 30)
    assert {part["status"] for part in known.values()} == {"failed"} and len(known) == 2


@pytest.mark.parametrize(("build", "order"), [(True, ["build", "tests", "floor"]), (False, ["tests", "floor"])])
def test_modules_are_compiled_before_the_clock_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: bool, order: list[str]
) -> None:
    seen: list[str] = []

    def measure(parts: gpu.Parts, name: str, deadline: float | None) -> None:
        seen.append(name)
        assert (deadline is None) == (name == "build")

    def run_suite(out: Path, limit: float) -> dict[str, Any]:
        seen.append("tests")
        return {"status": "skipped", "reason": "not here"}

    monkeypatch.setattr(gpu.Parts, "measure", measure)
    monkeypatch.setattr(gpu, "run_suite", run_suite)
    flags = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--parts", "floor", *(["--build"] if build else [])]
    assert gpu.main(flags) == 0
    assert seen == order


def test_outcomes_of_the_suite_are_counted_with_their_reasons() -> None:
    text = (
        "tests/gpu/a.py::x[cuda-[1]] PASSED [ 10%]\ntests/gpu/a.py::y[cuda-a b] FAILED [ 20%]\n"
        "tests/gpu/a.py::z SKIPPED (why) [ 30%]\ntests/gpu/a.py::w PASSED\n"
        "FAILED tests/gpu/a.py::y[cuda-a b] - AssertionError: assert 1 < 0\nSKIPPED [2] tests/gpu/conftest.py:9: why\n"
        "SKIPPED [3] tests/gpu/a.py:1: why\n"
    )
    found = counts(text)
    assert (found["passed"], found["failed"], found["skipped"]) == (2, 1, 1)
    assert found["failures"] == ["tests/gpu/a.py::y[cuda-a b] - AssertionError: assert 1 < 0"]
    assert found["skips"] == ["5 x why"]


@pytest.mark.deep
def test_the_suite_runs_without_the_projects_plugins_and_is_time_boxed(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_it.py").write_text(
        "import pytest, time\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_hangs(): time.sleep(60)\n"
    )
    found = run_suite(tmp_path, 15.0, suite)
    assert (found["passed"], found["failed"], found["status"]) == (1, 1, "test_it.py stopped after 15 s")
    assert run_suite(tmp_path, 6.0, tmp_path / "none")["status"] == "skipped"


def test_the_full_model_is_not_for_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu"]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("bench.gpu: no CUDA device here")
    assert not (tmp_path / "out").exists()
