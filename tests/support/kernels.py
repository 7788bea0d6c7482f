"""Shared by the tests of `eagle_server.ops`: a device for the kernels, and random trees.

Kernels run on the GPU if there is one, else in Triton's interpreter (see tests/conftest.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.ops.dispatch import FITS, Op
from eagle_server.ops.triton_support import HAS_TRITON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
with_triton = pytest.mark.parametrize("variant", [pytest.param("triton", marks=needs_triton)])


def each_variant(*operations: Op[..., Any]) -> pytest.MarkDecorator:
    """Runs a test once with each kind of variant of these operations. `variant`: the kind, see `take`.

    The torch twin computes what has no such variant.
    """
    kinds = dict.fromkeys(kind for operation in operations for kind in operation.variants)
    marks = {"triton": needs_triton}
    return pytest.mark.parametrize("variant", [pytest.param(kind, marks=marks.get(kind, ())) for kind in kinds])


def take(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all operations compute by variants of this kind, on any device."""
    for each in FITS:
        monkeypatch.setitem(FITS, each, lambda _, fits=(each == kind): fits)


def generator(*seed: int) -> torch.Generator:
    """A random generator with a fixed seed."""
    return torch.Generator().manual_seed(hash(seed))


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def random_parents(bs: int, size: int, deepest: int, source: torch.Generator) -> Tensor:
    """Parents of random trees, int64 [bs, size]. Parents come before children, and no node is deeper than `deepest`."""
    parents = torch.full((bs, size), -1)
    for request in range(bs):
        depths = [0]
        for node in range(1, size):
            open_nodes = [n for n in range(node) if depths[n] < deepest]
            parent = open_nodes[int(torch.randint(len(open_nodes), (), generator=source))]
            parents[request, node] = parent
            depths.append(depths[parent] + 1)
    return parents


def climb(parents: list[int], node: int) -> list[int]:
    """Node numbers from `node` up to the root."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path
