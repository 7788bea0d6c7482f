"""The kernels on ARM, which an emulator runs: check_kernels.cpp compares them with plain loops."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from eagle_server.ops.native import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
CHECK = Path(__file__).with_name("check_kernels.cpp")
FLAGS = ("-std=c++2a", "-O2", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-static", f"-I{build.SOURCES}")

pytestmark = pytest.mark.deep


def compiled(compiler: str, flags: tuple[str, ...], program: Path) -> Path:
    done = subprocess.run([compiler, *FLAGS, *flags, CHECK, "-o", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.skipif(
    None in (shutil.which(COMPILER), shutil.which(EMULATOR)), reason="needs g++-aarch64-linux-gnu and qemu-user"
)
@pytest.mark.parametrize("variant", build.VARIANTS["aarch64"])
def test_kernels_for_arm_equal_plain_loops(variant: str, tmp_path: Path) -> None:
    program = compiled(COMPILER, build.VARIANTS["aarch64"][variant].flags, tmp_path / "check")
    done = subprocess.run([EMULATOR, "-cpu", "max", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 differences with vectors of 4\n")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_kernels_for_this_machine_equal_plain_loops(tmp_path: Path) -> None:
    program = compiled("c++", ("-march=native",), tmp_path / "check")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(" with")[0]) == (0, "0 differences")
