"""Each test here runs on the CPU with torch twins and stand-ins, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="module", params=DEVICES)
def module_device(request: pytest.FixtureRequest) -> torch.device:
    """The same device, for fixtures with module scope."""
    return torch.device(request.param)


@pytest.fixture
def flashinfer(device: torch.device) -> Any:
    return flashinfer_on(device)


def flashinfer_on(device: torch.device) -> Any:
    """FlashInfer on a GPU, its emulation on the CPU."""
    if device.type == "cuda":
        return pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    from tests.support.flashinfer_emulation import Emulation

    return Emulation()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _skip_what_was_not_built())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _skip_what_was_not_built())


def _skip_what_was_not_built() -> Generator[None, object, object]:
    """Skip tests without a prebuilt FlashInfer module. With FLASHINFER_DISABLE_JIT only some shapes have one."""
    try:
        return (yield)
    except RuntimeError as error:
        if type(error).__name__ != "MissingJITCacheError":
            raise
        spec: Any = getattr(error, "spec", None)
        pytest.skip(f"no prebuilt FlashInfer module {getattr(spec, 'name', '')}".rstrip())


def moved(values: Any, device: torch.device) -> Any:
    """The values with all tensors copied to `device`, in any nesting of tuples and dictionaries."""
    return _mapped(values, lambda tensor: tensor.to(device, copy=True))


def on_cpu(values: Any) -> Any:
    return _mapped(values, lambda tensor: tensor.cpu())


def _mapped(values: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, dict):
        return {key: _mapped(value, function) for key, value in values.items()}
    return tuple(_mapped(value, function) for value in values) if isinstance(values, tuple) else values
