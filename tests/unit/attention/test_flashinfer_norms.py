"""FlashInfer's norms, which CuTe DSL compiles for each row size, compile for Hopper while warnings are errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.flashinfer_real import real_flashinfer


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose properties CuTe DSL may ask for; nothing is launched."""
    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed (the extra cuda)")
    real_flashinfer()
    from flashinfer.norm import kernels

    return kernels


@pytest.mark.deep
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("size", [64, 384, 4096])
def test_norms_compile_for_hopper(kernels: Any, size: int) -> None:
    for module, name in (("rmsnorm", "rmsnorm"), ("fused_add_rmsnorm", "fused_add_rmsnorm")):
        compiled = getattr(getattr(kernels, module), f"_get_compiled_{name}_kernel")
        assert compiled("bfloat16", size, 0.0, True, 90, True)


@pytest.mark.deep
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("size", [64, 128])
def test_norms_of_heads_compile_for_hopper(kernels: Any, size: int) -> None:
    assert kernels.rmsnorm._get_compiled_qk_rmsnorm_kernel("bfloat16", size, 0.0, True, 90)
