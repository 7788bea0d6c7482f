"""What tests of `eagle_server.ops` share: a device on which kernels run, and random trees.

Kernels run on a GPU where there is one, else in Triton's interpreter (see tests/conftest.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_server.ops.triton_support import HAS_TRITON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
# Run a test with the torch twin and with the kernel: both against the same plain reference.
each_way = pytest.mark.parametrize("way", ["twin", pytest.param("kernel", marks=needs_triton)])


def generator(*seed: int) -> torch.Generator:
    """The same numbers for the same `seed` in every run."""
    return torch.Generator().manual_seed(hash(seed))


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def random_parents(bs: int, size: int, deepest: int, source: torch.Generator) -> Tensor:
    """Trees of `size` nodes numbered parents first, none deeper than `deepest`: parents int64 [bs, size]."""
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
