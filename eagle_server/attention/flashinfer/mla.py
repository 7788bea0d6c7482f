"""The flashinfer backend for multi-head latent attention, absorbed: all query heads attend to one latent per token.

FlashInfer's MLA kernels take no mask, so every tree forward is a cascade: they compute the prefix, and our own kernel
computes the tree's block. Each plan of an MLA wrapper makes a new inner object, which reuses an int workspace of 8 MiB.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from eagle_server.attention.flashinfer.backend import check_dtype, flashinfer_module, is_hopper
from eagle_server.attention.flashinfer.forward import FlashInferBackend, Wrapper, WrapperKind
from eagle_server.attention.flashinfer.modules import warn_of_fa2, why_not_loaded
from eagle_server.attention.flashinfer.scratch import AttentionLimits, Mode, int_buffer
from eagle_server.attention.flashinfer.wrappers import Fence, Lengths
from eagle_server.attention.interface import Layout
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import LatentPool

MLAKernel = Literal["auto", "fa2"]


class FlashInferMLAAttention(FlashInferBackend):
    """`AttentionBackend` over a `LatentPool`: q [T, heads, rank + rope_dim] -> [T, heads, rank].

    Args:
        pool: holds the latents. It gives rank, dtype and device.
        workspace: shared with the process's other backends.
        heads: number of query heads. For causal forwards it should divide 64; else FlashInfer refuses some lengths.
        specs: (scale, 0) of every layer. Sliding windows are not supported.
        limits: the size of the largest forward, and which forwards have static buffers.
        module: FlashInfer, or a stand-in for tests.

    Raises:
        ValueError: FlashInfer has no kernels for the dtype, or a spec has a sliding window.
        ImportError: FlashInfer is not installed.
    """

    plans_on_device: ClassVar[bool] = False  # the library's planner cuts the work by the host's lengths

    def __init__(
        self,
        pool: LatentPool,
        workspace: Workspace,
        *,
        heads: int,
        specs: Collection[tuple[Any, ...]],
        limits: AttentionLimits,
        module: Any = None,
    ) -> None:
        super().__init__(pool, workspace, specs, limits)
        self._module = flashinfer_module() if module is None else module
        self._heads, self._rank = heads, pool.rank
        self._kernel: MLAKernel | None = None  # None: not known yet
        self._width, self._dtype = pool.keys[0].shape[2], pool.keys[0].dtype
        check_dtype(self._dtype, self._module)
        if any(spec.window for spec in self.specs):
            raise ValueError("latent attention has no sliding windows")
        workspace.require(_floats(self._rank, workspace.device))

    def mode(self, layout: Layout, sliding: int) -> Mode:
        if layout.mask_width is not None:
            return "cascade"
        return "decode" if layout.q_len == 1 else "prefill"

    def make(self, kind: WrapperKind) -> Wrapper:
        cascade = kind.mode == "cascade"
        arguments = {
            "num_heads": self._heads,
            "head_dim_ckv": self._rank,
            "head_dim_kpe": self._width - self._rank,
            "page_size": 1,
            "causal": not cascade,
            "sm_scale": kind.spec.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
            "query_layout": "packed",
            "kv_cache_layout": "packed",
            "lse_mode": "base2" if cascade else "none",
            "output_dtype": self._dtype,
        }
        buffers: dict[str, Any] = {}
        if kind.scratch is not None:
            device = self.workspace.device
            buffers = {
                "qo_indptr": int_buffer(kind.batch + 1, device),
                "kv_indptr": int_buffer(kind.batch + 1, device),
                "kv_indices": kind.scratch.slots(kind.mode, kind.batch, kind.rows),
                "kv_len_arr": int_buffer(kind.batch, device),
            }
        if self._kernel is None:
            self._kernel = self._loaded_kernel(arguments)
        return MLAWrapper(self._module.mla, self.workspace, arguments, buffers, self._kernel)

    def _loaded_kernel(self, arguments: dict[str, Any]) -> MLAKernel:
        """ "auto", which takes fa3 on Hopper; fa2 if that cannot be loaded."""
        if not is_hopper(self.workspace.device):
            return "auto"
        try:
            wrapper = MLAWrapper(self._module.mla, self.workspace, arguments, {}, "auto")
            wrapper.plan(Lengths.of([1], [1]), int_buffer(1, self.workspace.device))
        except (OSError, RuntimeError) as error:
            reason = why_not_loaded(error)
            if reason is None:
                raise
            warn_of_fa2("latent attention", reason)
            return "fa2"
        return "auto"


class MLAWrapper:
    """Attention over a `LatentPool`: FlashInfer's MLA wrapper and the arguments of all its plans. See `Wrapper`.

    Its planner cuts the work by lengths on the host, so the host plans every forward.
    """

    is_planned = False

    def __init__(
        self,
        mla: Any,
        workspace: Workspace,
        arguments: dict[str, Any],
        buffers: dict[str, Any],
        kernel: MLAKernel,
    ) -> None:
        self._mla, self._workspace, self._arguments, self._buffers = mla, workspace, arguments, buffers
        self._kernel = kernel
        self._float: Tensor | None = None
        self._wrapper: Any = None
        self.fence = Fence(workspace.device)

    def plan(self, lengths: Lengths, indices: Tensor) -> None:
        """Plan one forward. `bind` will write its slots to `indices`, int32.

        FlashInfer requires one index per slot. With static buffers it copies the indices onto themselves.
        """
        self.fence.wait()
        if self._float is not self._workspace.buffer:  # an MLA wrapper cannot change its buffer
            self._float = self._workspace.buffer
            self._wrapper = self._mla.BatchMLAPagedAttentionWrapper(
                self._float, use_cuda_graph=bool(self._buffers), backend=self._kernel, **self._buffers
            )
        metadata = self._mla.MLAPlanMetadata.csr(
            qo_indptr=lengths.qo_indptr,
            kv_indptr=lengths.kv_indptr,
            kv_indices=indices[: lengths.total],
            kv_len_arr=lengths.kv_lens,
        )
        self._wrapper.plan(metadata=metadata, **self._arguments)
        self.fence.set()

    def plan_on_device(self, kv_indptr: Tensor) -> None:
        """The host has planned."""

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend with q [T, heads, rank + rope_dim] over latents [slots, 1, rank + rope_dim].

        Writes `out`, and the base-2 LSE to `lse`.
        """
        if lse is None:
            self._wrapper.run(query=q, kv_cache=keys, out=out)
        else:
            self._wrapper.run(query=q, kv_cache=keys, out=out, lse=lse, return_lse=True)


def _floats(rank: int, device: torch.device) -> int:
    """Float workspace in bytes: two partial results of 64 rows per SM (MLAPlan in attention/scheduler.cuh)."""
    if device.type != "cuda":
        return 0
    rows = 2 * 64 * torch.cuda.get_device_properties(device).multi_processor_count
    return rows * (2 * rank + 4) + 1024
