"""The attention backends that an engine's models run on."""

from __future__ import annotations

from collections.abc import Collection
from subprocess import SubprocessError
from typing import Any

import torch

from eagle_server.attention.interface import AttentionBackend, LayerSpec, TreeMode
from eagle_server.attention.torch_native import torch_native
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import KVPool, KVShape, LatentPool, pool_of
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.models.config import ModelConfig
from eagle_server.ops.kv.indices import window_slots
from eagle_server.ops.layers.fused import use_flashinfer
from eagle_server.ops.triton_support import NoCompilerError, why_not_launched


class Backends:
    """Makes the attention backends of one engine. They share a workspace. `module`: FlashInfer, or a stand-in."""

    def __init__(self, config: EngineConfig, device: torch.device, module: Any = None) -> None:
        self.device, self._config, self._module = device, config, module
        self._workspace = Workspace(device) if config.backend == "flashinfer" else None
        use_flashinfer(enabled=config.backend == "flashinfer")

    def make(
        self,
        model: Any,
        pool: KVPool | LatentPool | None,
        graph_rows: Collection[int],
        trees: TreeMode,
        requests_each: int = 1,
    ) -> AttentionBackend:
        """The backend that a `model` runs on, over the KV of `pool`.

        `graph_rows`: rows per request of the forwards that are captured. `trees`: how attention under a tree mask is
        computed. `requests_each`: a forward may have up to this many times the requests that the engine runs.
        """
        assert pool is not None, "the model's attention reads a pool"
        if self._workspace is None:
            return torch_native(pool)
        # Imported here because a CPU does not need them, and their Triton kernels take a second to import.
        from eagle_server.attention.flashinfer.backend import AttentionLimits, FlashInferAttention
        from eagle_server.attention.flashinfer.mla import FlashInferMLAAttention

        config, specs, heads = self._config, layer_specs(model, model.config), model.config.num_heads
        limits = AttentionLimits(
            batch=config.max_running_requests * requests_each,
            kv_len=config.context_length + config.num_lookahead_slots,
            graph_batches=config.graph_sizes,
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
            verify="mask" if trees == "per_node" else trees,
            draft="per_node",
            module=self._module,
        )

    def freeze(self) -> None:
        """Keep the workspace where it is, because captured graphs hold its address."""
        if self._workspace is not None:
            self._workspace.freeze()


def launch_kernel(device: torch.device) -> None:
    """Launch one of this package's own kernels.

    Raises:
        NoCompilerError: Triton cannot launch any.
    """
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        window_slots(zero.int()[None], zero, zero, 1)
    except (OSError, RuntimeError, SubprocessError) as error:
        reason = why_not_launched(error)
        if reason is None:
            raise
        raise NoCompilerError(reason) from error


def load_kernels(model: ModelConfig, device: torch.device, module: Any = None) -> None:
    """Load FlashInfer's kernels for this model. nvcc compiles the kernels that are not prebuilt.

    `module`: FlashInfer, or a stand-in.

    Raises:
        MissingModuleError: they can be neither loaded nor compiled.
        ValueError: FlashInfer has no kernels for the head size or dtype.
    """
    from eagle_server.attention.flashinfer.backend import AttentionLimits, FlashInferAttention
    from eagle_server.attention.flashinfer.mla import FlashInferMLAAttention
    from eagle_server.attention.flashinfer.modules import load_modules
    from eagle_server.attention.flashinfer.scratch import LONG_ROWS

    use_flashinfer(enabled=True)
    shapes = tuple(dict.fromkeys(model.pool_layers))
    pool = pool_of(shapes, LONG_ROWS + 1, model.dtype, device)
    slides = sorted(set(model.windows or (0,)))
    options: dict[str, Any] = {
        "heads": model.num_heads,
        "specs": [
            (1.0, window, shape, heads)
            for window in slides
            for shape in (shapes if len(shapes) > 1 else [None])
            for heads in sorted(set(model.layer_heads or (0,)))
        ],
        "limits": AttentionLimits(batch=1, kv_len=LONG_ROWS),
        "module": module,
    }
    if isinstance(pool, LatentPool):
        assert model.mla is not None
        sizes = {model.hidden_size, model.mla.kv_lora_rank, model.mla.q_lora_rank or model.hidden_size}
        backend = FlashInferMLAAttention(pool, Workspace(device), **options)
        load_modules(backend, sizes, model.mla.qk_rope_head_dim)
    else:
        per_node = FlashInferAttention(pool, Workspace(device), draft="per_node", **options)
        load_modules(per_node, {model.hidden_size}, activation=model.activation)


def layer_specs(model: Any, config: ModelConfig) -> set[tuple[float, int, KVShape | None, int]]:
    """The distinct (scale, sliding window, shape, heads) of a model's attention layers, see `PlanSpec`.

    Raises:
        ValueError: a layer caps its scores, which the FlashInfer backend cannot do.
    """
    if caps_scores(model):
        raise ValueError(
            "--attention-backend flashinfer does not cap attention scores, which this model does: use torch_native"
        )
    shapes = [shape for shape in config.pool_layers if isinstance(shape, KVShape)]
    differ = len(set(shapes)) > 1
    return {
        (spec.scale, spec.sliding_window, shapes[spec.index] if differ else None, spec.heads) for spec in _specs(model)
    }


def caps_scores(model: Any) -> bool:
    """Whether any layer of a model caps its attention scores."""
    return any(spec.softcap for spec in _specs(model))


def _specs(model: Any) -> list[LayerSpec]:
    specs = [getattr(module, "spec", None) for module in model.modules()]
    return [spec for spec in specs if isinstance(spec, LayerSpec)]
