"""Every attention backend, in every mode and phase, against dense attention in float64.

On a GPU FlashInfer's kernels compute in bfloat16. On the CPU their emulation computes in float32. A bfloat16 kernel
does not round the products of its inputs, but rounds its weights and its output once each. That is an error of 2^-8 for
values of about 1, times a few for sums of several roundings. A slot that must not be read holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.attention.flashinfer.backend import FlashInferAttention
from eagle_server.attention.flashinfer.forward import AttentionLimits
from eagle_server.attention.flashinfer.mla import FlashInferMLAAttention
from eagle_server.attention.interface import AttentionBackend, AttentionBatch, BoundAttention, TreeMask
from eagle_server.attention.torch_native import torch_native
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import KVPool, KVShape, LatentPool, LatentShape
from tests.gpu.conftest import moved
from tests.support.paged import Case, World, as_projected, causal, draft_step, verify

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
WIDTH, ROWS = 320, 6
STATIC = AttentionLimits(ROWS, WIDTH, graph_batches=(1, 2, 4), graph_rows=(1, 3, 7))
EAGER = AttentionLimits(ROWS, WIDTH)

CAUSAL: dict[str, Callable[[World], Case]] = {
    "plain decoding": lambda w: causal(w, [0, 1, 2, 3], [1] * 4, [1, 300, 16, 129]),
    "draft-extend": lambda w: causal(w, [1, 4], [3, 3], [170, 4]),
    "a chain to verify": lambda w: causal(w, [0, 2, 3, 5], [7] * 4, [7, 200, 33, 8]),
    "short prompt chunks": lambda w: causal(w, [2, 0, 5], [9, 1, 14], [9, 7, 300]),
    "a long prompt chunk": lambda w: causal(w, [3, 1], [200, 5], [257, 5]),
}
TREES: dict[str, Callable[[World], Case]] = {
    "a tree": lambda w: verify(w, [3], [290]),
    "trees": lambda w: verify(w, [0, 2, 4, 5], [0, 9, 300, 128]),
    "a tree of 64": lambda w: verify(w, [5, 1], [200, 1], size=64),
    "the first draft step": lambda w: draft_step(w, [1, 2], [9, 300], 0),
    "a later draft step": lambda w: draft_step(w, [4, 1], [250, 1], 2),
    "a draft step of topk 8": lambda w: draft_step(w, [0, 4], [100, 129], 5, topk=8),
}
PHASES = CAUSAL | TREES
MODES = {
    "paged": ("paged", "paged"),
    "mask": ("mask", "mask"),
    "cascade": ("cascade", "cascade"),
    "per_node": ("mask", "per_node"),
}


@dataclass
class OnDevice:
    """A world with its pool on a device, in the dtype of the kernels there."""

    world: World
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        world, pool = self.world, self.world.pool
        # The kernels and the reference get the same values, which are exact in the dtype.
        world.keys, world.values = (x.to(self.dtype).float() for x in (world.keys, world.values))
        layers, slots, heads, dim = len(pool.keys), *pool.keys[0].shape
        self.pool: KVPool | LatentPool
        if isinstance(pool, LatentPool):
            self.pool = LatentPool([LatentShape(pool.rank, dim - pool.rank)] * layers, slots, self.dtype, self.device)
        else:
            self.pool = KVPool([KVShape(heads, dim)] * layers, slots, self.dtype, self.device)

    def error(self, backend: AttentionBackend, case: Case) -> float:
        """The largest error over the layers of one forward."""
        case.arrive()
        theirs = self.world.pool
        for mine, given in zip((*self.pool.keys, *self.pool.values), (*theirs.keys, *theirs.values), strict=True):
            mine.copy_(given)
        queries = case.queries().to(self.dtype).float()
        bound = backend.plan(case.layout).bind(batch_on(case.batch, self.device))
        found = case.run(Cast(bound, self.device, self.dtype), queries)
        assert not bool(found.isnan().any()), "an unwritten slot was read"
        return float((found.double() - case.expected(queries)).abs().max())

    @property
    def specs(self) -> list[tuple[float, int]]:
        return [(layer.scale, layer.sliding_window) for layer in self.world.layers]


@dataclass(frozen=True)
class Cast(BoundAttention):
    """`BoundAttention` for callers on the CPU."""

    bound: Any
    device: torch.device
    dtype: torch.dtype

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        q, k, v = (x.to(self.device, self.dtype) for x in (q, k, v))
        layer = replace(layer, sinks=None if layer.sinks is None else layer.sinks.to(self.device))
        return self.bound.run(*as_projected(q, k, v), layer).float().cpu()


def batch_on(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    mask = batch.mask
    if isinstance(mask, TreeMask):
        mask = TreeMask(*moved((mask.visible, mask.row_depths, mask.column_depths), device))
    names = ("req_pool_indices", "kv_lens", "req_to_token", "out_cache_loc")
    return replace(batch, mask=mask, **{name: moved(getattr(batch, name), device) for name in names})


def world_on(device: torch.device, **shape: Any) -> OnDevice:
    """A world on the device."""
    layers = shape.pop("layers", ((0.088, 0), (0.1, 0)))
    world = World(layers, rows=ROWS, width=WIDTH, **shape)
    return OnDevice(world, device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def heads_of(device: torch.device, heads: int, kv_heads: int) -> dict[str, int]:
    """Head counts and size. FlashInfer has prebuilt modules for 128; the emulation takes a small size."""
    return {"heads": heads, "kv_heads": kv_heads, "dim": 128 if device.type == "cuda" else 16}


def mha(on: OnDevice, module: Any, limits: AttentionLimits, modes: str) -> FlashInferAttention:
    assert isinstance(on.pool, KVPool)
    verify_mode, draft_mode = MODES[modes]
    return FlashInferAttention(
        on.pool,
        Workspace(on.device),
        heads=on.world.heads,
        specs=on.specs,
        limits=limits,
        verify=verify_mode,  # type: ignore[arg-type]
        draft=draft_mode,  # type: ignore[arg-type]
        module=module,
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 4)])
@pytest.mark.parametrize("limits", [EAGER, STATIC], ids=["eager", "static"])
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_flashinfer_gives_dense_attention(
    device: torch.device, flashinfer: Any, phase: str, modes: str, limits: AttentionLimits, heads: int, kv_heads: int
) -> None:
    on = world_on(device, **heads_of(device, heads, kv_heads))
    backend = mha(on, flashinfer, limits, modes)
    for _ in range(2 if device.type == "cuda" else 1):  # the second time with used wrappers
        assert on.error(backend, PHASES[phase](on.world)) < TOLERANCE[on.dtype]


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_flashinfer_keeps_sliding_windows(device: torch.device, flashinfer: Any, phase: str, modes: str) -> None:
    on = world_on(device, layers=((0.1, 0), (0.1, 50)), **heads_of(device, 8, 2))
    backend = mha(on, flashinfer, STATIC, modes)
    assert on.error(backend, PHASES[phase](on.world)) < TOLERANCE[on.dtype]


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("limits", [EAGER, STATIC], ids=["eager", "static"])
@pytest.mark.parametrize("phase", PHASES)
def test_flashinfer_mla_gives_dense_attention(
    device: torch.device, flashinfer: Any, phase: str, limits: AttentionLimits, heads: int
) -> None:
    rank, rope = (512, 64) if device.type == "cuda" else (16, 8)
    layers = ((0.06, 0), (0.07, 0))
    on = world_on(device, layers=layers, heads=heads if device.type == "cuda" else 4, dim=rank + rope, rank=rank)
    assert isinstance(on.pool, LatentPool)
    backend = FlashInferMLAAttention(
        on.pool, Workspace(on.device), heads=on.world.heads, specs=on.specs, limits=limits, module=flashinfer
    )
    for _ in range(2):
        assert on.error(backend, PHASES[phase](on.world)) < TOLERANCE[on.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rank", [0, 16], ids=["heads", "latent"])
@pytest.mark.parametrize("phase", PHASES)
def test_torch_native_gives_dense_attention(device: torch.device, phase: str, rank: int, dtype: torch.dtype) -> None:
    layers = ((0.1, 0),) if rank else ((0.1, 0), (0.1, 50))
    on = OnDevice(World(layers, heads=8, kv_heads=2, dim=24, rank=rank, rows=ROWS, width=WIDTH), device, dtype)
    assert on.error(torch_native(on.pool), PHASES[phase](on.world)) < TOLERANCE[dtype]
