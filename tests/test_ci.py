"""What .ci/suite.py makes of planted failures: they fail, unless they pass alone; then they are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep
SUITE = Path(__file__).parents[1] / ".ci" / "suite.py"
GOOD = "def test_good(): pass\n"
FLAKY = """
from pathlib import Path
def test_flaky():
    first = not Path("seen").exists()
    Path("seen").touch()
    assert not first
"""
DIES = """
import os
from pathlib import Path
def test_dies():
    with Path("runs").open("a") as runs:
        runs.write("x")
    os._exit(1)
"""
LEAVES = """
import subprocess, sys
from pathlib import Path
def test_leaves_a_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    Path("child").write_text(str(child.pid))
"""


def suite(folder: Path, tests: str, seconds: int = 600) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 2\nasyncio_default_fixture_loop_scope = function\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [sys.executable, str(SUITE), "it", str(seconds), "pytest -n 1"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def named(folder: Path) -> str:
    file = folder / ".pytest_cache" / "flaky.txt"
    return file.read_text() if file.exists() else ""


def test_a_suite_that_passes_passes(tmp_path: Path) -> None:
    assert suite(tmp_path, GOOD).returncode == 0
    assert named(tmp_path) == ""


def test_a_failing_test_fails_its_suite(tmp_path: Path) -> None:
    done = suite(tmp_path, f"{GOOD}def test_bad(): assert False\n")
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("FAILED test_it.py::test_bad") == 2  # in the suite, and alone
    assert named(tmp_path) == ""


def test_a_flaky_test_is_named_and_its_suite_passes(tmp_path: Path) -> None:
    done = suite(tmp_path, GOOD + FLAKY)
    assert done.returncode == 0, done.stdout
    assert named(tmp_path).startswith("FLAKY: test_it.py::test_flaky failed and passed (")


def test_many_failures_are_no_chance(tmp_path: Path) -> None:
    several = "import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_flaky(n)"
    done = suite(tmp_path, FLAKY.replace("def test_flaky()", several).replace('"seen"', 'f"seen{n}"'))
    assert done.returncode == 1, done.stdout
    assert "11 failed" in done.stdout and done.stdout.count(" failed in ") == 1


def test_a_test_that_hangs_ends_after_its_own_limit_and_no_process_is_left(tmp_path: Path) -> None:
    done = suite(tmp_path, f"{LEAVES}\nimport time\ndef test_hangs(): time.sleep(3600)\n")
    assert done.returncode == 1, done.stdout
    assert "Timeout" in done.stdout and "LEFT BY it" in done.stdout
    child = Path("/proc", (tmp_path / "child").read_text(), "cmdline")
    assert not child.exists() or not child.read_bytes()  # ended, or nobody has waited for it yet


def test_a_worker_that_dies_fails_its_suite_and_is_not_tried_for_ever(tmp_path: Path) -> None:
    done = suite(tmp_path, DIES + GOOD)
    assert done.returncode == 1, done.stdout
    assert (tmp_path / "runs").read_text() == "x"


def test_a_suite_that_has_no_time_left_ends_with_its_summary_and_fails(tmp_path: Path) -> None:
    slow = "import pytest, time\n@pytest.mark.parametrize('n', range(1000))\ndef test_slow(n): time.sleep(1)\n"
    done = suite(tmp_path, slow, seconds=1)
    assert done.returncode == 1, done.stdout
    assert "session-timeout" in done.stdout and " passed in " in done.stdout
