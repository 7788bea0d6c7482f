"""Which attention a model of an engine runs on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from eagle_server.attention.interface import AttentionBackend, LayerSpec
from eagle_server.attention.torch_native import TorchNativeAttention
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import KVPool, LatentPool
from eagle_server.engine.shape import EngineConfig, TreeMode


class Backends:
    """Makes the backends of one engine, which share a workspace. `module`: FlashInfer, or what stands in for it."""

    def __init__(self, shape: EngineConfig, device: torch.device, module: Any = None) -> None:
        self._shape, self._module = shape, module
        self._workspace = Workspace(device) if shape.backend == "flashinfer" else None

    def make(
        self, model: Any, pool: KVPool | LatentPool, graph_rows: Collection[int], trees: TreeMode
    ) -> AttentionBackend:
        """The backend of a module `model` over `pool`. `graph_rows`: rows per request of its captured forwards.

        `trees`: how forwards under a tree mask are computed.
        """
        if self._workspace is None:
            return TorchNativeAttention(pool)
        # Imported here: a CPU has no use for them, and their Triton kernels take a second to import.
        from eagle_server.attention.flashinfer import AttentionLimits, FlashInferAttention
        from eagle_server.attention.flashinfer_mla import FlashInferMLAAttention

        shape, specs, heads = self._shape, layer_specs(model), model.config.num_heads
        limits = AttentionLimits(
            batch=shape.max_running,
            kv_len=shape.context_length + shape.window,
            graph_batches=shape.graph_sizes,
            graph_rows=graph_rows,
        )
        if isinstance(pool, LatentPool):
            return FlashInferMLAAttention(
                pool, self._workspace, heads=heads, specs=specs, limits=limits, module=self._module
            )
        return FlashInferAttention(
            pool,
            self._workspace,
            heads=heads,
            specs=specs,
            limits=limits,
            verify="mask" if trees == "beams" else trees,
            draft="beams",
            module=self._module,
        )

    def freeze(self) -> None:
        """Once graphs are captured, the workspace they point to must stay where it is."""
        if self._workspace is not None:
            self._workspace.freeze()


def layer_specs(model: Any) -> set[tuple[float, int]]:
    """The distinct (scale, sliding window) of a module's attention layers.

    Raises:
        ValueError: a layer caps its scores, which the FlashInfer backend does not do.
    """
    if caps_scores(model):
        raise ValueError(
            "--attention-backend flashinfer does not cap attention scores, which this model does: use torch_native"
        )
    return {(spec.scale, spec.window) for spec in _specs(model)}


def caps_scores(model: Any) -> bool:
    """Whether any layer of a module caps its attention scores."""
    return any(spec.softcap for spec in _specs(model))


def _specs(model: Any) -> list[LayerSpec]:
    specs = [getattr(module, "spec", None) for module in model.modules()]
    return [spec for spec in specs if isinstance(spec, LayerSpec)]
