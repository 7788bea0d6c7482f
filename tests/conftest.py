"""Set-up shared by all tests. Warnings are errors: `filterwarnings` in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch, triton and huggingface_hub are imported, here, in the conftests below and in servers that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
# The tests' tensors are tiny, and `pytest -n` has a process for every core: more threads cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where there is no GPU, Triton's kernels run in its interpreter, on CPU tensors. It looks when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_small_models() -> Iterator[None]:
    """Engines built by their options take two threads, which spin at every short operation and take each other's cores.

    Torch is left alone where no test of this run has imported it.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch

    from eagle_server.engine.assembly import devices

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "SMALL_MODEL_THREADS", 1)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernel-flags", default="", help="more flags for the compiler of kernels/cpu, such as sanitizers"
    )


def pytest_configure(config: pytest.Config) -> None:
    if flags := config.getoption("--kernel-flags").split():
        from eagle_server.ops.native import build

        build._FLAGS = (*build._FLAGS, *flags)
    if importlib.util.find_spec("hypothesis") is None:  # python -m eagle_tools.bench.gpu does not need it
        return
    import hypothesis

    # The same examples in every run: a failure of CI is one that everybody can see.
    hypothesis.settings.register_profile("eagle_server", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("eagle_server")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("deep"):
            item.add_marker("slow")
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
