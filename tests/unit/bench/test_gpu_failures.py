"""The GPU benchmark where something is missing or breaks: packages, pytest, a kernel."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from eagle_tools.bench.gpu.machine import is_fatal
from eagle_tools.bench.gpu.suite import ROOT, SUITE, run_suite

DISTRIBUTIONS = {"pyyaml": "yaml", "pyzmq": "zmq"}  # whose module has another name


def missing_packages() -> set[str]:
    """What eagle_server depends on, and the tests import, but docs/gpu.md does not ask for."""
    described = " ".join((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())
    needed = re.search(r"It needs ([^.]*)\.", described)
    assert needed is not None
    listed = {name.lower() for name in re.findall(r"\w+", needed[1])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["tools"]]
    names = [re.split(r"[<>=~;\[ ]", each)[0].lower() for each in requirements]
    modules = {DISTRIBUTIONS.get(name, name).replace("-", "_") for name in [*names, "hypothesis", "scipy"]}
    assert listed & modules == {"torch", "numpy", "safetensors", "tqdm", "msgspec", "matplotlib"}
    return modules - listed - {"jinja2"}  # torch brings it


def run_bare(program: str) -> subprocess.CompletedProcess[str]:
    """A program where only the packages of docs/gpu.md are installed, and pytest without plugins."""
    whole = f"import sys; sys.modules.update(dict.fromkeys({missing_packages()!r}))\n{program}"
    environment = {"PYTHONPATH": ":".join([str(ROOT), *sys.path]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )


def test_the_benchmark_imports_no_more_than_docs_gpu_md_lists() -> None:
    parts = sorted((ROOT / "eagle_tools" / "bench" / "gpu").glob("*.py"))
    ended = run_bare("\n".join(f"import eagle_tools.bench.gpu.{part.stem}" for part in parts))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.deep
def test_the_gpu_suite_imports_no_more_than_docs_gpu_md_lists(tmp_path: Path) -> None:
    from eagle_tools.bench.gpu.suite import _INI, _command

    settings = tmp_path / "pytest.ini"
    settings.write_text(_INI + f"pythonpath = {ROOT}\n")
    options = [*_command(settings, SUITE)[4:], "--collect-only", "-q"]
    ended = run_bare(f"import pytest; raise SystemExit(pytest.main({options!r}))")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def suite_of(folder: Path, **files: str) -> Path:
    suite = folder / "suite"
    suite.mkdir()
    for name, text in files.items():
        (suite / f"{name}.py").write_text("import pytest\npytestmark = pytest.mark.gpu\n" + text)
    return suite


def test_a_suite_that_cannot_start_has_failed(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, conftest="import no_such_module", test_a="def test_good(): pass")
    found = run_suite(tmp_path, 60.0, suite)
    assert (found["passed"], found["failed"]) == (0, 1)
    assert "test_a.py ended with status" in found["status"] and "no_such_module" in found["failures"][0]


@pytest.mark.deep
def test_a_file_that_cannot_be_imported_has_failed_and_the_others_count(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, test_a="import no_such_module", test_b="def test_good(): pass")
    found = run_suite(tmp_path, 60.0, suite)
    assert (found["passed"], found["failed"]) == (1, 1)
    assert found["failures"][0].startswith("test_a.py ended with status 2")


@pytest.mark.deep
def test_a_suite_without_tests_has_failed(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, test_a="pytestmark = []\ndef test_not_for_a_gpu(): pass")
    found = run_suite(tmp_path, 60.0, suite)
    assert (found["passed"], found["failed"], found["status"]) == (0, 1, "no test ran")


REASONS = ("an illegal memory access was encountered", "misaligned address", "unspecified launch failure")
LIBRARIES = {
    "torch": "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call",
    "Triton": "Triton Error [CUDA]: {}",
    "FlashInfer's prefill": "BatchPrefillWithPagedKVCache failed with error {}",
    "FlashInfer's fa3": "BatchPrefillWithPagedKVCacheSM90Run failed with error: {}",
    "FlashInfer's norms": "FusedAddRMSNorm failed with error code {}",
    "FlashInfer's MLA": "Failed to run MLA, error: {}",
    "FlashInfer's gate": "Failed to launch kernel: {}",
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_process_with_a_broken_gpu_is_known_by_each_librarys_words(library: str, reason: str) -> None:
    assert is_fatal(RuntimeError(LIBRARIES[library].format(reason)))


def test_other_errors_leave_the_process_usable() -> None:
    for words in (
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "out of resource: shared memory, Required: 264192, Hardware limit: 232448",
        "BatchPrefillWithPagedKVCache failed with error invalid argument",
        "Buffer overflow when allocating memory for batch_prefill_tmp_v",
    ):
        assert not is_fatal(RuntimeError(words))


def test_the_libraries_still_write_these_words() -> None:
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("Triton is not installed")
    driver = Path(triton.origin).parent / "backends" / "nvidia" / "driver.c"
    assert LIBRARIES["Triton"].removesuffix("{}") in driver.read_text()
    flashinfer = importlib.util.find_spec("flashinfer")
    if flashinfer is None or flashinfer.origin is None:
        pytest.skip("flashinfer-python is not installed")
    sources = Path(flashinfer.origin).parent / "data" / "csrc"
    for name in ("batch_prefill_sm90.cu", "batch_decode.cu", "norm.cu", "batch_mla_run.cu"):
        assert "cudaGetErrorString" in (sources / name).read_text()
