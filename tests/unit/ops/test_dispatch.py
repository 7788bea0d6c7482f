"""The dispatch of operations: what a call chooses, and that every variant of every operation has a test."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle_server.ops.dispatch import FITS, OPERATIONS, Op
from tests.support import operations
from tests.support.kernels import take

operations.load()


def scaled(x: Tensor, factor: float, *, offset: float = 0.0) -> str:
    """The contract."""
    return "torch"


def by_kernel(x: Tensor, factor: float, *, offset: float = 0.0) -> str:
    return "kernel"


def test_a_call_takes_the_first_variant_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, x = Op(scaled), torch.zeros(1)
    operation.on("native")(lambda x, factor, *, offset=0.0: "native")
    operation.on("triton", when=lambda x, factor, **_: factor > 1)(by_kernel)
    assert (operation.__doc__, inspect.signature(operation)) == ("The contract.", inspect.signature(scaled))
    for kind in FITS:
        monkeypatch.setitem(FITS, kind, lambda _: True)
    assert operation(x, 2.0, offset=1.0) == "kernel", "preferred, though registered later"
    assert operation(x, 1.0) == "native"
    take("triton", monkeypatch)
    assert (operation(x, 2.0), operation(x, 1.0, offset=2.0)) == ("kernel", "torch")
    take("torch", monkeypatch)
    assert operation(x, 2.0) == "torch"


@pytest.mark.parametrize("kind", ["torch", "triton", "tritton"])
def test_a_kind_is_known_and_registered_once(kind: str) -> None:
    operation = Op(scaled)
    operation.on("triton")(by_kernel)
    with pytest.raises(ValueError, match=rf"'{kind}' must be one of \[.*'triton'.*\], once for each operation"):
        operation.on(kind)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_variant_has_the_contracts_signature_and_a_test(name: str) -> None:
    operation = OPERATIONS[name]
    assert operation.__doc__ and len(operation.variants) > 1
    for variant in operation.variants.values():
        assert inspect.signature(variant) == inspect.signature(operation), variant
    tested = re.compile(rf"each_variant\([^)]*\b{name}\b")
    assert any(tested.search(path.read_text("utf-8")) for path in Path(__file__).parent.rglob("test_*.py"))


def test_the_table_of_operations_is_up_to_date() -> None:
    assert operations.table() in operations.PAGE.read_text("utf-8"), "python -m tests.support.operations"
