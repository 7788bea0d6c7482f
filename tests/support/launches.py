"""What Triton would compile: the signature of each launch, from Triton's own rules, on a machine without a GPU.

Triton compiles a kernel again for other types and constants, for an integer that is 1 or a multiple of 16, and for an
address that is a multiple of 16.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import pytest


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
