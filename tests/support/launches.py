"""What Triton would compile: the signature of each launch, from Triton's own rules, on a machine without a GPU.

Triton compiles a kernel again for other types and constants, for an integer that is 1 or a multiple of 16, and for an
address that is a multiple of 16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from types import FunctionType, ModuleType
from typing import Any

import pytest

from eagle_server.ops import device as device_module
from tests.support.replay import tensors_of

CHOICES = {"on_gpu", "has_truncation_kernel"}  # which choose between a kernel and its twin


def launched(monkeypatch: pytest.MonkeyPatch, *, run: bool = True) -> set[str]:
    """A set that receives the signature of every launch from now on. run: whether the interpreter runs the kernels."""
    from triton.runtime.interpreter import InterpretedFunction

    seen: set[str] = set()
    original = InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        _, specialization, options = _binder(self)(*args, **kwargs)
        seen.add(f"{self.fn.__name__} {specialization} {options}")
        return original(self, *args, grid=grid, warmup=warmup, **kwargs) if run else None

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return seen


@cache
def _binder(kernel: Any) -> Any:
    """What finds the specialization of a launch's arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    names = ("do_not_specialize", "do_not_specialize_on_alignment")
    compiled = JITFunction(kernel.fn, **{name: kernel.kwargs[name] for name in names})
    return create_function_from_signature(compiled.signature, compiled.params, make_backend(GPUTarget("cuda", 90, 32)))


def launch_kernels(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let these modules launch kernels on a CPU too."""
    for module in modules:
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
        if hasattr(module, "available"):
            monkeypatch.setattr(module, "available", lambda *_: False)


def compute_with_twins(
    monkeypatch: pytest.MonkeyPatch, aside: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Let every operation launch its kernels as on a GPU, and take its results from its torch twin.

    Use it where launches are recorded but not run. An operation returns the tensors of its kernel's branch, so that
    addresses and strides are those of a GPU, with the twin's values. aside: the context in which the twins run.
    """
    twins = 0  # that are running

    def operation(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def launched_and_computed(*args: Any, **kwargs: Any) -> Any:
            nonlocal twins
            if twins:
                return original(*args, **kwargs)
            results = original(*args, **kwargs)
            twins += 1
            try:
                with aside():
                    computed = original(*args, **kwargs)
                    for result, values in zip(tensors_of(results), tensors_of(computed), strict=True):
                        result.copy_(values)
            finally:
                twins -= 1
            return results

        return launched_and_computed

    wrapped: dict[Any, Callable[..., Any]] = {}
    for module in [each for name, each in sys.modules.items() if name.startswith("eagle_server.")]:
        for name, value in list(vars(module).items()):
            if is_operation(value):
                monkeypatch.setattr(module, name, wrapped.setdefault(value, operation(value)))
        if module.__name__.startswith("eagle_server.ops.") and hasattr(module, "on_gpu") and module != device_module:
            monkeypatch.setattr(module, "on_gpu", lambda _: not twins)


def is_operation(value: object) -> bool:
    """Whether this is a function that chooses between a kernel and its twin, and not one of the choices."""
    if not isinstance(value, FunctionType) or not value.__module__.startswith("eagle_server."):
        return False
    return bool(CHOICES.intersection(value.__code__.co_names)) and value.__annotations__["return"] != "bool"
