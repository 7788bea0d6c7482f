"""What FlashInfer lacks is found before the weights are loaded, and said in one line that names the fix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_server.attention.flashinfer import backend as backend_module
from eagle_server.attention.flashinfer import mla as flashinfer_mla
from eagle_server.attention.flashinfer.modules import (
    MissingModuleError,
    warn_of_another_toolkit,
    warn_of_fa2,
    why_not_loaded,
)
from eagle_server.config import DEMO_TARGET, ConfigError, parse_args
from eagle_server.engine.assembly import backends, devices
from eagle_server.engine.assembly import from_config as build
from eagle_server.models.checkpoints.load_target import read_model_config
from eagle_server.models.config import ModelConfig
from eagle_server.models.targets.registry import read_target_config
from eagle_server.ops.layers import fused
from tests.support.deepseek import DEEPSEEK
from tests.support.engines import plain, random_target
from tests.support.flashinfer_emulation import Emulation
from tests.support.flashinfer_real import real_flashinfer
from tests.support.fused_kernels import fake_flashinfer, use_kernel_branch
from tests.support.paged import CPU

CUDA = torch.device("cuda")


class MissingJITCacheError(RuntimeError):
    """As FlashInfer's, with the module's name."""

    def __init__(self, name: str) -> None:
        super().__init__("JIT compilation is disabled via FLASHINFER_DISABLE_JIT environment variable")
        self.spec = SimpleNamespace(name=name)


NO_NINJA = FileNotFoundError(2, "No such file or directory", "ninja")
ERRORS: dict[str, tuple[Exception, str]] = {
    "no toolkit": (
        RuntimeError("Could not find nvcc and default cuda_home='/cuda' doesn't exist"),
        "no nvcc",
    ),
    "no compiler in it": (
        RuntimeError("Ninja build failed. Ninja output:\nFAILED: x.o\n/bin/sh: 1: /cuda/bin/nvcc: not found\n"),
        "no nvcc",
    ),
    "no ninja": (NO_NINJA, "pip install ninja"),
    "an old toolkit": (
        RuntimeError("Ninja build failed. Ninja output:\nnvcc fatal error: Unsupported gpu architecture\nstopped\n"),
        "Unsupported gpu architecture",
    ),
    "compiling is forbidden": (MissingJITCacheError("norm"), "no module norm is prebuilt"),
}


def failing(error: Exception, *kernels: str) -> Emulation:
    """A FlashInfer that cannot load the modules of these kernels."""
    emulation = Emulation()

    def wrapper(cls: Any) -> Any:
        def __init__(self: Any, *arguments: Any, backend: str = "auto", **named: Any) -> None:
            cls.__init__(self, *arguments, backend=backend, **named)
            self.kernel = backend

        def plan(self: Any, *arguments: Any, **named: Any) -> None:
            if self.kernel in kernels:
                raise error
            cls.plan(self, *arguments, **named)

        return type(cls.__name__, (cls,), {"__init__": __init__, "plan": plan})

    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        setattr(emulation, name, wrapper(getattr(emulation, name)))
    mla = emulation.mla
    mla.BatchMLAPagedAttentionWrapper = wrapper(mla.BatchMLAPagedAttentionWrapper)
    return emulation


def llama(head_dim: int = 64) -> ModelConfig:
    return replace(random_target().config, head_dim=head_dim, dtype=torch.bfloat16)


def deepseek() -> ModelConfig:
    return read_target_config(DEEPSEEK)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backend_module, flashinfer_mla):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)


@pytest.mark.parametrize("case", ERRORS)
def test_a_missing_module_is_one_line_that_names_the_fix(case: str) -> None:
    error, words = ERRORS[case]
    for model, kernels in ((llama(), ("fa2", "fa3")), (deepseek(), ("auto", "fa2"))):
        with pytest.raises(MissingModuleError) as found:
            backends.load_kernels(model, CPU, failing(error, *kernels))
        assert words in str(found.value) and "\n" not in str(found.value)


def test_other_errors_are_not_explained_away() -> None:
    assert why_not_loaded(RuntimeError("CUDA error: an illegal memory access was encountered")) is None
    with pytest.raises(RuntimeError, match="head_dim"):
        backends.load_kernels(llama(), CPU, failing(RuntimeError("Unsupported head_dim"), "fa2"))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("read", "preferred"), [(llama, "fa3"), (deepseek, "auto")], ids=["heads", "latent"])
def test_fa2_computes_what_fa3_would_where_fa3_cannot_be_loaded(
    read: Callable[[], ModelConfig], preferred: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = read()
    warn_of_fa2.cache_clear()
    backends.load_kernels(model, CPU, Emulation())
    assert not caplog.messages
    for _ in range(2):  # it is said once per process
        backends.load_kernels(model, CPU, failing(MissingJITCacheError("prefill_sm90"), preferred))
    (warning,) = caplog.messages
    assert "prefill_sm90" in warning and "fa2" in warning


def served(flags: list[str]) -> Any:
    return parse_args(["--speculative-algorithm", "NONE", "--dtype", "bfloat16", *flags], environ={})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and FlashInfer, but no nvcc."""

    def load_kernels(model: ModelConfig, device: torch.device) -> None:
        raise MissingModuleError("FlashInfer has no prebuilt kernels for this model, and no nvcc")

    monkeypatch.setattr(build, "resolve_device", lambda config: CUDA)
    monkeypatch.setattr(backends, "launch_kernel", lambda device: None)
    monkeypatch.setattr(devices, "warn_of_another_toolkit", lambda: None)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(backends, "load_kernels", load_kernels)


@pytest.mark.usefixtures("gpu")
def test_a_server_that_cannot_compile_refuses_before_it_loads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_target", lambda *a, **k: pytest.fail("the weights are loaded"))
    with pytest.raises(ConfigError, match="no nvcc; or choose --attention-backend torch_native"):
        build.load_models(served([]), progress=False)


NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
NO_HEADERS = CalledProcessError(1, ["/usr/bin/gcc", "/tmp/main.c", "-I/usr/include/python3.11"])  # Python.h is missing


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", ["flashinfer", "torch_native"])
@pytest.mark.parametrize("error", [NO_COMPILER, NO_HEADERS], ids=["no compiler", "no headers"])
def test_a_gpu_without_a_c_compiler_is_refused_before_weights_are_loaded(
    backend: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a part of its driver before the first launch. The stand-in is the first kernel."""

    def launch(*arguments: Any) -> None:
        raise error

    monkeypatch.undo()
    monkeypatch.setattr(build, "resolve_device", lambda config: torch.device("meta"))
    monkeypatch.setattr(backends, "window_slots", launch)
    monkeypatch.setattr(build, "load_target", lambda *a, **k: pytest.fail("the weights are loaded"))
    with pytest.raises(ConfigError, match="install gcc and python3-dev") as found:
        build.load_models(served(["--attention-backend", backend]), progress=False)
    assert "\n" not in str(found.value)


def test_other_errors_of_the_first_launch_are_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(backends, "window_slots", launch)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        backends.launch_kernel(CPU)


@pytest.mark.parametrize(("read", "sizes"), [(llama, {32}), (deepseek, {48, 32, 24})], ids=["heads", "latent"])
def test_only_the_fused_operations_of_the_model_are_loaded(
    read: Callable[[], ModelConfig], sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are rotated by a kernel of our own, so that FlashInfer's module for it need not be compiled."""
    fake, seen, normed = fake_flashinfer(), set[str](), set[int]()

    def recorded(name: str) -> Callable[..., Any]:
        def call(x: Any, *arguments: Any, **named: Any) -> Any:
            seen.add(name)
            normed.update([x.shape[-1]] if "norm" in name else [])
            return getattr(fake, name)(x, *arguments, **named)

        return call

    use_kernel_branch(monkeypatch, SimpleNamespace(**{name: recorded(name) for name in vars(fake)}))
    monkeypatch.setattr(fused, "can_use_table", lambda *_: True)
    backends.load_kernels(read(), CPU, Emulation())
    rotates = {"apply_rope_with_cos_sin_cache_inplace"} if read is deepseek else set[str]()
    assert seen == {"rmsnorm", "fused_add_rmsnorm", "silu_and_mul"} | rotates
    assert normed == sizes


@pytest.mark.deep  # needs FlashInfer's Python code
def test_flashinfer_does_not_say_of_each_plan_which_kernels_are_for_other_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_flashinfer()
    from flashinfer.jit.core import logger

    for level, kept in ((logging.INFO, logging.WARNING), (logging.DEBUG, logging.DEBUG)):  # DEBUG was asked for
        monkeypatch.setattr(logger, "level", level)
        backend_module.flashinfer_module()
        assert logger.level == kept


@pytest.mark.deep  # needs FlashInfer's Python code
@pytest.mark.parametrize(("release", "warned"), [("12.4", True), ("13.0", False)])
def test_a_toolkit_of_another_cuda_than_torchs_is_warned_of(
    release: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_flashinfer()
    from flashinfer.jit import cpp_ext

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.99'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for cached in (cpp_ext.get_cuda_path, cpp_ext.get_cuda_version):
        cached.cache_clear()
    warn_of_another_toolkit()
    for cached in (cpp_ext.get_cuda_path, cpp_ext.get_cuda_version):
        cached.cache_clear()
    assert ("let CUDA_HOME name a toolkit of CUDA 13" in caplog.text) == warned


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_serve_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(devices, "_DEVICE_NODES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert devices.resolve_device(served([])) == CPU, "a driver without a GPU"
    (tmp_path / "nvidia0").touch()
    for flags in ([], ["--device", "cuda"]):
        with pytest.raises(ConfigError, match=r"driver on your system is too old \(found version 12040\).*docs/gpu"):
            devices.resolve_device(served(flags))
    assert devices.resolve_device(served(["--device", "cpu"])) == CPU


class LoadedError(Exception):
    """The weights would be loaded now."""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("flags", [["--attention-backend", "torch_native"], ["--dtype", "float32"]], ids=str)
def test_torch_native_needs_no_module(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load_target(*arguments: Any, **named: Any) -> None:
        raise LoadedError

    monkeypatch.setattr(build, "load_target", load_target)
    with pytest.raises(LoadedError):
        build.load_models(served(flags), progress=False)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("head_dim", [80, 96])
def test_head_sizes_without_kernels_take_torch_native(head_dim: int, caplog: pytest.LogCaptureFixture) -> None:
    model = llama(head_dim=head_dim)
    caplog.set_level("INFO")
    assert devices.resolve_backend(served([]), CUDA, model) == "torch_native"
    assert f"has no kernels for heads of {head_dim}" in caplog.text
    with pytest.raises(ConfigError, match=f"no kernels for heads of {head_dim}: drop it, or choose torch_native"):
        devices.resolve_backend(served(["--attention-backend", "flashinfer"]), CUDA, model)


def test_an_engine_on_torch_native_uses_no_fused_operation_of_flashinfer() -> None:
    target = random_target()
    with torch.no_grad():
        plain(target, backend="flashinfer", stand_ins={"flashinfer": Emulation()})
        assert fused.can_use_table(CUDA, torch.bfloat16, 64, 64)
        plain(target, backend="torch_native")
        assert not fused.can_use_table(CUDA, torch.bfloat16, 64, 64)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("flags", "head_dim", "dtype", "backend", "said"),
    [
        ([], None, torch.bfloat16, "flashinfer", "bfloat16 instead of the checkpoint's float32"),
        (["--dtype", "float32"], None, torch.float32, "torch_native", ""),
        (["--attention-backend", "torch_native"], None, torch.float32, "torch_native", ""),
        (["--attention-backend", "flashinfer"], None, torch.bfloat16, "flashinfer", "bfloat16 instead of"),
        ([], 80, torch.float32, "torch_native", "no kernels for heads of 80"),
    ],
    ids=str,
)
def test_the_demo_takes_what_is_fast_on_a_gpu_and_says_so(
    flags: list[str],
    head_dim: int | None,
    dtype: torch.dtype,
    backend: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    config = parse_args(flags, environ={})
    demo = read_model_config(DEMO_TARGET)
    model = devices.as_served(config, CUDA, demo if head_dim is None else replace(demo, head_dim=head_dim))
    assert model.dtype == dtype and devices.resolve_backend(config, CUDA, model) == backend
    assert bool(devices.graph_sizes(config, devices.resolve_backend(config, CUDA, model))) == (backend == "flashinfer")
    assert said in caplog.text and bool(caplog.messages) == bool(said)
    assert devices.as_served(config, CPU, demo).dtype == (dtype if "--dtype" in flags else torch.float32)


@pytest.mark.usefixtures("gpu")
def test_without_flashinfer_the_demo_is_served_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    demo = read_model_config(DEMO_TARGET)
    assert devices.as_served(parse_args([], environ={}), CUDA, demo).dtype == torch.float32
    (warning,) = caplog.messages
    assert "without CUDA graphs" in warning and "pip install 'eagle-server[cuda]'" in warning
    with pytest.raises(ConfigError, match="not installed"):
        devices.as_served(parse_args(["--attention-backend", "flashinfer"], environ={}), CUDA, demo)


@pytest.mark.usefixtures("gpu")
def test_the_demos_weights_are_loaded_in_the_dtype_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_target(*arguments: Any, dtype: str, **named: Any) -> None:
        assert dtype == "bfloat16"
        raise LoadedError

    monkeypatch.setattr(backends, "load_kernels", lambda model, device: None)
    monkeypatch.setattr(build, "load_target", load_target)
    with pytest.raises(LoadedError):
        build.load_models(parse_args([], environ={}), progress=False)
