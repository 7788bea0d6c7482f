"""The native kernels as compiled for several processors, and their threads."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_server.ops.native import library as native
from eagle_server.ops.native.build import compile_kernels

THIS = "this machine"
MACHINES = {
    "without tiles": ("-march=native", "-mno-amx-tile"),
    "AVX-512 without VNNI": ("-march=skylake-avx512",),
    "AVX2": ("-march=x86-64-v3",),
    "SSE2": ("-march=x86-64",),
}


@pytest.fixture(scope="module", params=[THIS, *(pytest.param(name, marks=pytest.mark.deep) for name in MACHINES)])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library that serves on this machine, or one for lesser machines, which processes of `pytest -n` share."""
    patch = pytest.MonkeyPatch()
    if request.param == "AVX-512 without VNNI" and "avx512bw" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    if request.param != THIS:
        shared = tmp_path_factory.getbasetemp()
        shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
        path = shared / f"kernels {request.param}.so"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if not path.exists():
                compile_kernels(path, MACHINES[request.param])
        patch.setattr(native, "library", lambda: ctypes.CDLL(str(path)))
    forget()
    yield
    patch.undo()
    forget()


def forget() -> None:
    """Use the library that `native.library` gives from now on."""
    native.functions.cache_clear()
    native._session_of.cache_clear()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(native, "_threads", request.param)
    yield
    patch.undo()
