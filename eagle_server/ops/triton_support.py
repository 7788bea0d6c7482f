"""Triton where it is installed; the package imports and works without it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, partial
from subprocess import CalledProcessError
from typing import Any, overload

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

triton: Any = importlib.import_module("triton") if HAS_TRITON else None
tl: Any = importlib.import_module("triton.language") if HAS_TRITON else None


class NoCompilerError(RuntimeError):
    """Triton cannot compile what it needs to launch kernels. The message is one line that says what to install."""


def why_not_launched(error: BaseException) -> str | None:
    """What is missing, in one line, if Triton raised `error` because it could not compile its driver. Else None.

    Before a process's first launch Triton compiles some C against Python.h, once per machine.
    """
    install = "every GPU backend needs them: install gcc and python3-dev, the headers of this Python"
    if "Failed to find C compiler" in str(error):
        return f"Triton finds no C compiler; {install}"
    if isinstance(error, CalledProcessError):  # what the compiler wrote stands on stderr
        return f"Triton's call of {error.cmd[0]} failed, for lack of a working C compiler or of Python.h; {install}"
    return None


@overload
def jit(kernel: Callable[..., Any]) -> Any: ...


@overload
def jit(*, varying: Sequence[str]) -> Callable[[Callable[..., Any]], Any]: ...


def jit(kernel: Callable[..., Any] | None = None, *, varying: Sequence[str] = ()) -> Any:
    """`triton.jit`. Without Triton the function is returned unchanged and is never called.

    varying: arguments that differ from batch to batch. The kernel is not compiled again where such an integer is 1 or a
    multiple of 16, or such an address is not a multiple of 16.
    """
    if kernel is None:
        return partial(jit, varying=varying)
    if not HAS_TRITON:
        return kernel
    return triton.jit(kernel, do_not_specialize=varying, do_not_specialize_on_alignment=varying)


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that may be launched while the one before it still runs, on GPUs from Hopper on.

    The kernel has a constexpr PDL, and begins with this, before it reads or writes memory:

        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

    Source: CUDA's programmatic dependent launch.
    """
    return {"PDL": True, "launch_pdl": True} if device.type == "cuda" and _is_hopper(device) else {"PDL": False}


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9  # noqa: PLR2004


def constant(value: int | float) -> Any:
    """A module-level constant for use in kernels."""
    return tl.constexpr(value) if HAS_TRITON else value


def blocks(count: int, size: int) -> int:
    """The number of blocks of `size` that cover `count`."""
    return -(-count // size)


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`. Triton requires such block sizes."""
    return max(least, 1 << max(count - 1, 0).bit_length())
