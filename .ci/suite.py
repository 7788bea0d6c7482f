"""Run one suite of tests; what failed in it is run once more, alone: python .ci/suite.py NAME SECONDS COMMAND.

NAME names its report in .pytest_cache. After SECONDS pytest ends the suite, with its summary. If at most `MOST_AGAIN`
tests failed and all pass alone, the suite has passed, and .pytest_cache/flaky.txt names them. No process of it is left.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ET
from pathlib import Path

CACHE = Path(".pytest_cache")
LAST_FAILED = CACHE / "v" / "cache" / "lastfailed"
MOST_AGAIN = 10  # more failed tests than that are no chance
MARK = "CI_SUITE"  # in the environment of all processes of a suite; the server would ask what EAGLE_SERVER_CI_SUITE is
PASSED, FAILED = 0, 1


class Suite:
    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.end = time.monotonic() + seconds
        self.mark = f"{MARK}={uuid.uuid4()}"

    def run(self, command: str, report: Path) -> int:
        """The status of a command that calls pytest."""
        print(f"+ {command}", flush=True)
        LAST_FAILED.unlink(missing_ok=True)
        report.unlink(missing_ok=True)
        left = max(1.0, self.end - time.monotonic())
        # After a crash no test is given to a new worker: xdist would run the one that crashed there, too, without end.
        options = f"--session-timeout={left:.0f} --junit-xml={report} --max-worker-restart=0"
        environment = {**os.environ, "PYTEST_ADDOPTS": options, MARK: self.mark.partition("=")[2]}
        try:
            return subprocess.run(["bash", "-c", command], env=environment, check=False).returncode
        finally:
            self._end_leftovers()

    def _end_leftovers(self) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    os.kill(int(process.name), signal.SIGKILL)
                    print(f"LEFT BY {self.name}, ended now: {words}", flush=True)
            except OSError:
                continue  # it has ended, or is another user's

    def passes(self, command: str) -> bool:
        """Runs the suite, and again what failed."""
        first, second = CACHE / f"{self.name}.xml", CACHE / f"{self.name}-again.xml"
        status = self.run(command, first)
        failed = list(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
        if status != FAILED:
            return status == PASSED  # others: time was up, a wrong option, nothing collected
        if not 0 < len(failed) <= MOST_AGAIN or _a_worker_crashed(first):
            return False  # after a crash not all tests were run
        # Test ids are all that is named, so no mark leaves one out.
        if self.run(f"pytest -n 0 -m '' {shlex.join(failed)}", second) != PASSED:
            return False
        before, after = _seconds(first), _seconds(second)
        with (CACHE / "flaky.txt").open("a") as named:
            for test in failed:
                times = f"{before.get(test, 0):.1f} s, then {after.get(test, 0):.1f} s alone"
                named.write(f"FLAKY: {test} failed and passed ({times}): to mend in the next commit\n")
        return True


def _a_worker_crashed(report: Path) -> bool:
    return not report.exists() or "crashed while running" in report.read_text(encoding="utf-8")


def _seconds(report: Path) -> dict[str, float]:
    """By test id. A report has modules with dots, and no `::`."""
    found = dict[str, float]()
    for case in ET.parse(report).getroot().iter("testcase"):
        module = re.sub(r"\.", "/", case.get("classname", ""))
        found[f"{module}.py::{case.get('name')}"] = float(case.get("time", 0))
    return found


if __name__ == "__main__":
    name, seconds, command = sys.argv[1:]
    sys.exit(PASSED if Suite(name, float(seconds)).passes(command) else FAILED)
