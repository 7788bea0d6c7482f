"""What Triton would compile: the signature of each launch, from Triton's own rules, on a machine without a GPU.

Triton compiles a kernel again for other types and constants, for an integer that is 1 or a multiple of 16, and for an
address that is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from threading import local
from types import ModuleType
from typing import Any

import pytest

from eagle_server.ops.dispatch import FITS, Op
from tests.support.replay import tensors_of


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
    """Let these modules, which choose kernels themselves, launch them on a CPU too."""
    for module in modules:
        monkeypatch.setattr(module, "on_gpu", lambda _: True)


def compute_with_twins(
    monkeypatch: pytest.MonkeyPatch, aside: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Let every operation launch its kernels as on a GPU, and take its results from its torch twin.

    Use it where launches are recorded but not run. An operation returns the tensors of its kernel's branch, so that
    addresses and strides are those of a GPU, with the twin's values. aside: the context in which the twins run.
    """
    call, running = Op.__call__, local()  # whether a twin is running, in each thread

    def twin_runs() -> bool:
        return getattr(running, "twin", False)

    def launched_and_computed(self: Op[..., Any], *args: Any, **kwargs: Any) -> Any:
        results = call(self, *args, **kwargs)
        if "triton" in self.variants and not twin_runs():
            running.twin = True
            try:
                with aside():
                    computed = call(self, *args, **kwargs)
                    for result, values in zip(tensors_of(results), tensors_of(computed), strict=True):
                        result.copy_(values)
            finally:
                running.twin = False
        return results

    monkeypatch.setattr(Op, "__call__", launched_and_computed)
    monkeypatch.setitem(FITS, "triton", lambda _: not twin_runs())
    monkeypatch.setitem(FITS, "native", lambda _: False)
