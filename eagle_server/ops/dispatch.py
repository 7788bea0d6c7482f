"""Which code computes an operation: its torch twin, or a variant that is registered beside it.

    @op
    def walk_tree(draft_token: Tensor, ...) -> Walk:  # in torch; its docstring is the contract
    @walk_tree.on("triton")
    def _walk_triton(draft_token: Tensor, ...) -> Walk:  # the same signature

A call chooses anew, by its first argument, which is a tensor. What is chosen once, when weights are packed or an engine
is assembled, is no operation in this sense.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from eagle_server.ops.device import on_gpu
from eagle_server.ops.native.library import available

Given = ParamSpec("Given")
Result = TypeVar("Result")

# By kind of variant, preferred ones first: whether it computes where this tensor is.
FITS: dict[str, Callable[[Tensor], bool]] = {
    "triton": on_gpu,
    "native": lambda tensor: available(tensor.device, torch.float32),
}
OPERATIONS: dict[str, Op[..., Any]] = {}  # by name, of all modules that were imported


class Op(Generic[Given, Result]):
    """A function with variants. It is called as its torch twin, which computes everything that no variant does."""

    def __init__(self, twin: Callable[Given, Result]) -> None:
        update_wrapper(self, twin)
        self.variants: dict[str, Callable[Given, Result]] = {"torch": twin}  # by kind
        self.conditions: list[tuple[str, Callable[..., bool] | None]] = []  # of variants, preferred ones first

    def on(
        self, kind: str, when: Callable[..., bool] | None = None
    ) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
        """Register a variant of a kind in `FITS`.

        when: whether it computes these arguments; None: all.

        Raises:
            ValueError: there is no such kind, or the operation has such a variant.
        """
        if kind not in FITS or kind in self.variants:
            raise ValueError(f"{kind!r} must be one of {sorted(FITS)}, once for each operation")

        def register(variant: Callable[Given, Result]) -> Callable[Given, Result]:
            self.variants[kind] = variant
            self.conditions.append((kind, when))
            self.conditions.sort(key=lambda each: list(FITS).index(each[0]))
            return variant

        return register

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        first: Any = args[0]
        for kind, when in self.conditions:
            if FITS[kind](first) and (when is None or when(*args, **kwargs)):
                return self.variants[kind](*args, **kwargs)
        return self.variants["torch"](*args, **kwargs)


def op(twin: Callable[Given, Result]) -> Op[Given, Result]:
    """Make an operation of its torch twin."""
    operation = Op(twin)
    OPERATIONS[twin.__name__] = operation
    return operation
