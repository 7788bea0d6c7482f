"""The flashinfer backend: multi-head and grouped-query attention on NVIDIA GPUs.

Causal forwards need no mask; single rows go to the decode kernels. A tree is either a bit mask over prefix and window,
or a cascade: the prefix without a mask, the tree's block by our own kernel, merged by their log-sum-exp. A sliding
window under a tree is counted by depth, which only a mask can say: layers with one keep the mask when the others
cascade. A draft step may also run as decode queries, one per node with its own list of slots; positions along such a
list are consecutive, so that sliding windows need nothing more.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any, Literal

import torch

from eagle_server.attention.flashinfer_forward import FlashInferBackend, Form, Wrapper
from eagle_server.attention.flashinfer_scratch import AttentionLimits, Mode, int_buffer
from eagle_server.attention.flashinfer_wrappers import DecodeWrapper, Heads, PagedWrapper, plan_arguments
from eagle_server.attention.interface import Layout
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import KVPool

__all__ = ["FlashInferAttention", "AttentionLimits", "Workspace", "flashinfer_module"]

TreeMode = Literal["mask", "cascade", "beams", "auto"]

# "auto" is a cascade from this many KV slots on, else a mask, which costs rows * kv_len bits, read in every tile.
# Not measured yet.
CASCADE_FROM = 4096

TENSOR_CORES_FROM = 2  # query heads per KV head from which decode runs on tensor cores
HEAD_DIMS = (64, 128, 256, 512)  # that fa2 has kernels for
_DTYPES = (torch.float16, torch.bfloat16)


def flashinfer_module() -> Any:
    """FlashInfer itself. Raises ImportError with what to install."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ImportError("--attention-backend flashinfer needs it: pip install 'eagle-server[cuda]'") from error


def check_dtype(dtype: torch.dtype, module: Any) -> None:
    """Refuse what FlashInfer has no kernels for; a stand-in with `any_dtype` and `any_head_dim` computes everything."""
    if dtype not in _DTYPES and not getattr(module, "any_dtype", False):
        raise ValueError(
            f"FlashInfer's kernels compute in float16 and bfloat16, not {dtype}: choose --dtype bfloat16, "
            "or --attention-backend torch_native"
        )


class FlashInferAttention(FlashInferBackend):
    """`AttentionBackend` over a `KVPool`.

    Args:
        pool: where K and V live; head sizes, dtype and device are its own.
        workspace: shared with the process's other backends.
        heads: query heads.
        specs: (scale, sliding window or 0) of every layer, duplicates allowed. Each distinct one is planned apart.
        limits: the largest forward, and which are static.
        verify: how tree forwards are computed, "mask", "cascade" or "auto".
        draft: the same for draft steps, where there is "beams" too.
        module: FlashInfer, or what stands in for it (tests).

    Raises:
        ValueError: FlashInfer has no kernels for the dtype or head size, or a mode is unknown.
        ImportError: FlashInfer is not installed.
    """

    def __init__(  # noqa: PLR0913  the arguments of one composition root
        self,
        pool: KVPool,
        workspace: Workspace,
        *,
        heads: int,
        specs: Collection[tuple[float, int]],
        limits: AttentionLimits,
        verify: TreeMode = "auto",
        draft: TreeMode = "auto",
        module: Any = None,
    ) -> None:
        super().__init__(pool, workspace, specs, limits)
        self._module = flashinfer_module() if module is None else module
        _, kv_heads, head_dim = pool.keys[0].shape
        self._heads = Heads(heads, kv_heads, head_dim, pool.keys[0].dtype)
        check_dtype(self._heads.dtype, self._module)
        if head_dim not in HEAD_DIMS and not getattr(self._module, "any_head_dim", False):
            raise ValueError(f"FlashInfer has kernels for head sizes {HEAD_DIMS}, not {head_dim}")
        if verify not in ("mask", "cascade", "auto") or draft not in ("mask", "cascade", "beams", "auto"):
            raise ValueError(f"no such way to attend: verify={verify!r}, draft={draft!r}")
        self._verify, self._draft = verify, draft
        workspace.require(_eager_floats(head_dim, workspace.device))

    def mode(self, layout: Layout, sliding: int) -> Mode:
        if layout.window is None:
            return "decode" if layout.q_len == 1 else "prefill"
        chosen = self._verify if layout.seen is None else self._draft
        if chosen == "auto":
            chosen = "cascade" if max(layout.kv_lens) >= CASCADE_FROM else "mask"
        return "mask" if chosen == "cascade" and sliding else chosen

    def make(self, form: Form) -> Wrapper:
        return self._decode(form) if form.mode in ("decode", "beams") else self._prefill(form)

    def _prefill(self, form: Form) -> PagedWrapper:
        scale, sliding = form.spec
        masked = form.mode == "mask"
        arguments = plan_arguments(self._heads, scale, 0 if masked else sliding)
        arguments |= {"head_dim_qk": self._heads.head_dim, "causal": form.mode == "prefill"}
        buffers: dict[str, Any] = {"use_cuda_graph": form.static, "backend": "auto" if form.long else "fa2"}
        if form.static:
            device = self.workspace.device
            arguments["uniform_q_len"] = form.rows
            buffers |= {
                "qo_indptr_buf": int_buffer(form.batch + 1, device),
                "paged_kv_indptr_buf": int_buffer(form.batch + 1, device),
                "paged_kv_indices_buf": self.scratch.slots(form.mode, form.batch, form.rows),
                "paged_kv_last_page_len_buf": int_buffer(form.batch, device),
            }
        if masked:
            mask = self.scratch.mask(form.batch, form.rows, sliding)
            buffers |= {"custom_mask_buf": mask.bits, "mask_indptr_buf": mask.indptr}
        wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self.workspace.buffer, "NHD", **buffers)
        return PagedWrapper(wrapper, self.workspace, arguments, static=form.static)

    def _decode(self, form: Form) -> DecodeWrapper:
        arguments = plan_arguments(self._heads, *form.spec) | {"head_dim": self._heads.head_dim}
        buffers: dict[str, Any] = {"use_cuda_graph": form.static, "backend": "fa2"}
        if form.static:
            device = self.workspace.device
            queries = form.batch * form.rows
            buffers |= {
                "paged_kv_indptr_buffer": int_buffer(queries + 1, device),
                "paged_kv_indices_buffer": self.scratch.slots(form.mode, form.batch, form.rows),
                "paged_kv_last_page_len_buffer": int_buffer(queries, device),
            }
        wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace.buffer,
            "NHD",
            use_tensor_cores=self._heads.heads // self._heads.kv_heads >= TENSOR_CORES_FROM,
            **buffers,
        )
        return DecodeWrapper(wrapper, self.workspace, arguments, static=form.static)


def _eager_floats(head_dim: int, device: torch.device) -> int:
    """The most float workspace, in bytes, that plans without static buffers need.

    Without CUDA graphs fa2 splits KV only while its tiles number at most 2 * SMs / kv_heads, of at most 128 query rows
    times heads of a group: so heads drop out (PrefillPlanImpl in flashinfer/attention/scheduler.cuh).
    """
    if device.type != "cuda":
        return 0
    tiles = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return tiles * 128 * (head_dim + 1) * 4 + 1024
