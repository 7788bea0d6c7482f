"""Runs tests/gpu and counts the outcomes, also when time runs out."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eagle_tools.bench.gpu.packages import installed

ROOT = Path(__file__).parents[3]
SUITE = ROOT / "tests" / "gpu"
_OUTCOME = re.compile(r"^(\S*::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", re.MULTILINE)
_REASON = re.compile(r"^(?:FAILED|ERROR) (\S*::.*)$", re.MULTILINE)
_SKIP = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)$", re.MULTILINE)
_INI = "[pytest]\nmarkers =\n    gpu: needs an NVIDIA GPU\n    slow: takes long\n"
SHOWN = 12  # failures
LAST_WORDS = 4.0  # seconds
_ORDINARY, NOTHING_TO_RUN = (0, 1), 5  # exit statuses of pytest: all passed, some failed; no test was selected


def run_suite(out: Path, limit: float, suite: Path = SUITE) -> dict[str, Any]:
    """Counts, and the reasons of failures and skips. The whole output is in `out`/tests.txt.

    Each file runs in its own process, all at once: most of the time goes to compiling kernels, and a kernel that makes
    its process unusable affects no other file. The project's own pytest settings are not used, because they name
    plugins that a bare machine may lack.
    """
    if not suite.is_dir() or not installed("pytest"):
        missing = "pytest is not installed" if suite.is_dir() else f"there is no {suite}"
        return {"status": "skipped", "reason": missing}
    settings, deadline = out / "pytest.ini", time.monotonic() + limit
    settings.write_text(_INI + f"pythonpath = {ROOT}\n")
    with ExitStack() as sinks:
        running = []
        for file in sorted(suite.glob("test_*.py")):
            log = out / f"{file.stem}.txt"
            sink = sinks.enter_context(log.open("w"))
            process = subprocess.Popen(_command(settings, file), stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT)
            running.append((file.name, log, process))
        codes = [_wait(process, deadline) for _, _, process in running]
    texts = [log.read_text(errors="replace") for _, log, _ in running]
    text = "\n".join(texts)
    (out / "tests.txt").write_text(text)
    for _, log, _ in running:
        log.unlink()
    names = [name for name, _, _ in running]
    stopped = [f"{name} stopped after {limit:.0f} s" for name, code in zip(names, codes, strict=True) if code is None]
    broken = [reason for ended in zip(names, codes, texts, strict=True) if (reason := _broken(*ended))]
    results = counts(text)
    if not broken and not stopped and not results["passed"] + results["failed"] + results["skipped"]:
        broken = ["no test ran"]
    results["failed"] += len(broken)
    results["failures"] = [*broken, *results["failures"]][:SHOWN]
    return {"status": "; ".join([*stopped, *broken]) or "ok", **results}


def _command(settings: Path, file: Path) -> list[str]:
    places = ["-c", str(settings), f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "--import-mode=importlib"]
    options = ["-p", "no:cacheprovider", "-v", "--tb=short", "-rfEs", "-m", "gpu"]
    return [sys.executable, "-u", "-m", "pytest", *places, *options, str(file)]


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The exit status; None: it was stopped at the deadline."""
    try:
        return process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that pytest prints its summary, unless a kernel hangs
        try:
            process.wait(timeout=LAST_WORDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def _broken(name: str, code: int | None, text: str) -> str:
    """Why a file's tests did not run; "" if they did. pytest ends with status 1 also if it cannot start."""
    if code is None or code == NOTHING_TO_RUN:
        return ""
    if code in _ORDINARY and _OUTCOME.search(text):
        return ""
    last = text.strip().rpartition("\n")[2].strip()
    return f"{name} ended with status {code}: {last}"[:240]


def counts(text: str) -> dict[str, Any]:
    """The number of each outcome in pytest's verbose output, with reasons from its summary."""
    ended = _OUTCOME.findall(text)
    outcomes = [outcome for _, outcome in ended]
    reasons = _REASON.findall(text) or [name for name, outcome in ended if outcome in ("FAILED", "ERROR")]
    skips = Counter[str]()
    for number, reason in _SKIP.findall(text):
        skips[reason[:160]] += int(number)
    return {
        "passed": outcomes.count("PASSED"),
        "failed": outcomes.count("FAILED") + outcomes.count("ERROR"),
        "skipped": outcomes.count("SKIPPED"),
        "failures": [" ".join(reason.split())[:240] for reason in reasons][:SHOWN],
        "skips": [f"{number} x {reason}" for reason, number in skips.most_common()],
    }
