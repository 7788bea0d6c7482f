"""Shared by the tests of `eagle_server.ops`: a device for the kernels, and random trees.

Kernels run on the GPU if there is one, else in Triton's interpreter (see tests/conftest.py).
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from eagle_server.ops.triton_support import HAS_TRITON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
# Runs a test with the torch twin and with the kernel. Both are compared with the same plain reference.
each_way = pytest.mark.parametrize("way", ["twin", pytest.param("kernel", marks=needs_triton)])
every_way = pytest.mark.parametrize("way", ["twin", "native", pytest.param("kernel", marks=needs_triton)])


def take(way: str, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let these modules of `eagle_server.ops` compute with torch, the CPU's native kernels or Triton's."""
    for module in modules:
        monkeypatch.setattr(module, "on_gpu", lambda _: way == "kernel")
        if hasattr(module, "available"):
            monkeypatch.setattr(module, "available", lambda *_: way == "native")


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
