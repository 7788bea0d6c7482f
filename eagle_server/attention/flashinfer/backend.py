"""The flashinfer backend: multi-head and grouped-query attention on NVIDIA GPUs.

Causal forwards need no mask; those with one query row per request use the decode kernels. Forwards of a few rows, trees
and chains, are computed by a kernel of our own, which needs no plan (`ops/tree/paged.py`). Over a long context a tree
is a cascade: FlashInfer computes the prefix without a mask, our own kernel computes the tree's block, and both are
merged by their log-sum-exp. In a tree, sliding windows are measured by depth. FlashInfer can express that by a bit mask
over prefix and window only, which is left for heads that are too large for our own kernel. A draft step may also run as
decode queries: one per node, each with its own list of slots. Positions in such a list are consecutive, so sliding
windows work there unchanged.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal, get_args

import torch

from eagle_server.attention.batches import PIECE_ROWS
from eagle_server.attention.flashinfer.forward import FlashInferBackend, PlanSpec, Wrapper, WrapperKind
from eagle_server.attention.flashinfer.modules import FA3_HEAD_DIMS, HEAD_DIMS, warn_of_fa2, why_not_loaded
from eagle_server.attention.flashinfer.scratch import AttentionLimits, Mode, int_buffer
from eagle_server.attention.flashinfer.wrappers import (
    DecodeWrapper,
    Heads,
    Lengths,
    PagedWrapper,
    StaticWrapper,
    plan_arguments,
)
from eagle_server.attention.interface import Layout, TreeMode
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import KVPool, KVShape
from eagle_server.ops.tree.paged import LARGEST_HEAD

__all__ = ["FlashInferAttention", "AttentionLimits", "Workspace", "flashinfer_module"]

PromptKernel = Literal["fa2", "fa3"]

# "auto" means a cascade if a request has at least this many KV slots and several rows, else our own kernel. For a tree
# of 64 in one layer of an 8B model on an H100 that one takes 13, 21, 44 and 138 us over 600, 2,000, 8,000 and 32,000
# slots; fa2 takes 31, 38, 84 and 292 under a mask. Without one it takes 38 and 107 over the last two, which is a
# cascade's largest part; the block and the merge take about 10 more.
CASCADE_FROM = 16384
FEW_ROWS = PIECE_ROWS - 1  # up to so many causal rows per request, our own kernel computes them

TENSOR_CORES_FROM = 2  # decode uses tensor cores from this many query heads per KV head
_DTYPES = (torch.float16, torch.bfloat16)


def flashinfer_module() -> Any:
    """The module flashinfer. Raises an ImportError that says what to install."""
    try:
        module = importlib.import_module("flashinfer")
    except ImportError as error:
        raise ImportError("--attention-backend flashinfer needs it: pip install 'eagle-server[cuda]'") from error
    log = importlib.import_module("flashinfer.jit.core").logger
    if log.level == logging.INFO:  # its default; it says for trees of four rows that a kernel is for other models
        log.setLevel(logging.WARNING)
    return module


def check_dtype(dtype: torch.dtype, module: Any) -> None:
    """Raise ValueError if FlashInfer has no kernels for this dtype. A test's stand-in may have `any_dtype`."""
    if dtype not in _DTYPES and not getattr(module, "any_dtype", False):
        raise ValueError(
            f"FlashInfer's kernels compute in float16 and bfloat16, not {dtype}: choose --dtype bfloat16, "
            "or --attention-backend torch_native"
        )


def is_hopper(device: torch.device) -> bool:
    """Whether fa3's kernels, which are written for sm_90, can run on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9  # noqa: PLR2004


class FlashInferAttention(FlashInferBackend):
    """`AttentionBackend` over a `KVPool`.

    Args:
        pool: holds K and V. It gives head size, dtype and device.
        workspace: shared with the process's other backends.
        heads: number of query heads.
        specs: (scale, sliding window or 0) of every layer, duplicates allowed, with its `KVShape` if the pool's layers
            differ, and its query heads if layers differ in them. Each distinct spec has its own plan.
        limits: the size of the largest forward, and which forwards have static buffers.
        verify: how tree forwards are computed: "paged", "mask", "cascade" or "auto".
        draft: how draft steps are computed: as `verify`, or "per_node".
        module: FlashInfer, or a stand-in for tests.

    Raises:
        ValueError: FlashInfer has no kernels for the dtype or head size, or a mode is unknown.
        ImportError: FlashInfer is not installed.
    """

    def __init__(
        self,
        pool: KVPool,
        workspace: Workspace,
        *,
        heads: int,
        specs: Collection[tuple[Any, ...]],
        limits: AttentionLimits,
        verify: TreeMode = "auto",
        draft: TreeMode = "auto",
        module: Any = None,
    ) -> None:
        super().__init__(pool, workspace, specs, limits)
        self._module = flashinfer_module() if module is None else module
        shapes = {keys.shape[1:] for keys in pool.keys}
        self._heads = {KVShape(kv, dim): Heads(heads, kv, dim, pool.keys[0].dtype) for kv, dim in shapes}
        self._any_shape = KVShape(*pool.keys[0].shape[1:])
        check_dtype(pool.keys[0].dtype, self._module)
        for _, head_dim in shapes:
            if head_dim not in HEAD_DIMS and not getattr(self._module, "any_head_dim", False):
                raise ValueError(
                    f"FlashInfer has kernels for head sizes {HEAD_DIMS}, not {head_dim}: choose --attention-backend "
                    "torch_native"
                )
        if verify == "per_node" or not {verify, draft} <= set(get_args(TreeMode)):
            raise ValueError(f"no such way to attend: verify={verify!r}, draft={draft!r}")
        self._verify, self._draft = verify, draft
        self._prompt_kernels: dict[tuple[bool, KVShape | None], PromptKernel] = {}  # with a sliding window, or without
        workspace.require(_eager_floats(max(head_dim for _, head_dim in shapes), workspace.device))

    def mode(self, layout: Layout, sliding: int) -> Mode:
        if layout.mask_width is None:
            if layout.q_len == 1:
                return "decode"
            few = layout.q_len is not None and layout.q_len <= FEW_ROWS
            return "paged" if few and self._pages(layout, self._verify) else "prefill"
        chosen = asked = self._verify if layout.num_visible is None else self._draft
        if chosen == "auto":
            cascades = layout.q_len != 1 and max(layout.kv_lens) >= CASCADE_FROM
            chosen = "cascade" if cascades else "paged"
        if chosen == "paged" or (chosen == "cascade" and sliding):
            return "paged" if self._pages(layout, asked) else "mask"
        return chosen

    def _pages(self, layout: Layout, asked: TreeMode) -> bool:
        """Whether our own kernel computes the forward. It is compiled for each shape: by itself for captured ones."""
        if any(heads.head_dim > LARGEST_HEAD for heads in self._heads.values()):
            return False
        limits = self.scratch.limits
        captured = len(layout.q_lens) in limits.graph_batches and layout.q_len in limits.graph_rows
        return asked == "paged" or (asked == "auto" and captured)

    def make(self, kind: WrapperKind) -> Wrapper:
        if kind.mode not in ("decode", "per_node"):
            return self._prefill(kind)
        # With tensor cores both wrappers run the same kernels. A prefill wrapper with static buffers is planned once.
        heads = self._heads_of(kind.spec)
        uses_tensor_cores = heads.heads // heads.kv_heads >= TENSOR_CORES_FROM
        return self._paged(kind, "fa2") if kind.static and uses_tensor_cores else self._decode(kind)

    def _heads_of(self, spec: PlanSpec) -> Heads:
        heads = self._heads[spec.shape or self._any_shape]
        return replace(heads, heads=spec.heads) if spec.heads else heads

    def _prefill(self, kind: WrapperKind) -> PagedWrapper:
        return self._paged(kind, self._prompt_kernel(kind.spec) if kind.long else "fa2")

    def _prompt_kernel(self, spec: PlanSpec) -> PromptKernel:
        """fa3 if FlashInfer has it for this GPU and head size and can load it, else fa2."""
        key = (spec.window > 0, spec.shape)
        if key not in self._prompt_kernels:
            self._prompt_kernels[key] = "fa3" if self._loads_fa3(spec) else "fa2"
        return self._prompt_kernels[key]

    def _loads_fa3(self, spec: PlanSpec) -> bool:
        device = self.workspace.device
        if self._heads_of(spec).head_dim not in FA3_HEAD_DIMS or not is_hopper(device):
            return False
        try:
            self._paged(WrapperKind("prefill", spec), "fa3").plan(Lengths.of([1], [1]), int_buffer(1, device))
        except (OSError, RuntimeError) as error:
            reason = why_not_loaded(error)
            if reason is None:
                raise
            warn_of_fa2("prompts", reason)
            return False
        return True

    def _paged(self, kind: WrapperKind, kernel: PromptKernel) -> PagedWrapper:
        masked, heads = kind.mode == "mask", self._heads_of(kind.spec)
        arguments = plan_arguments(heads, kind.spec.scale, 0 if masked else kind.spec.window)
        arguments |= {"head_dim_qk": heads.head_dim, "causal": kind.mode == "prefill"}
        buffers: dict[str, Any] = {"use_cuda_graph": kind.static, "backend": kernel}
        if kind.scratch is not None:
            device = self.workspace.device
            requests, rows = (kind.batch * kind.rows, 1) if kind.mode == "per_node" else (kind.batch, kind.rows)
            arguments["uniform_q_len"] = rows
            buffers |= {
                "qo_indptr_buf": int_buffer(requests + 1, device),
                "paged_kv_indptr_buf": int_buffer(requests + 1, device),
                "paged_kv_indices_buf": kind.scratch.slots(kind.mode, kind.batch, kind.rows),
                "paged_kv_last_page_len_buf": int_buffer(requests, device),
            }
        if masked:
            assert kind.scratch is not None
            mask = kind.scratch.mask(kind.batch, kind.rows, kind.spec.window)
            buffers |= {"custom_mask_buf": mask.bits, "mask_indptr_buf": mask.indptr}
        wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self.workspace.buffer, "NHD", **buffers)
        if kind.scratch is None:
            return PagedWrapper(wrapper, self.workspace, arguments, static=False)
        lengths = buffers["paged_kv_indptr_buf"], buffers["paged_kv_last_page_len_buf"]
        return StaticWrapper(wrapper, self.workspace, arguments, lengths, kind.scratch.limits.kv_len)

    def _decode(self, kind: WrapperKind) -> DecodeWrapper:
        heads = self._heads_of(kind.spec)
        arguments = plan_arguments(heads, kind.spec.scale, kind.spec.window) | {"head_dim": heads.head_dim}
        buffers: dict[str, Any] = {"use_cuda_graph": kind.static, "backend": "fa2"}
        if kind.scratch is not None:
            device = self.workspace.device
            queries = kind.batch * kind.rows
            buffers |= {
                "paged_kv_indptr_buffer": int_buffer(queries + 1, device),
                "paged_kv_indices_buffer": kind.scratch.slots(kind.mode, kind.batch, kind.rows),
                "paged_kv_last_page_len_buffer": int_buffer(queries, device),
            }
        wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace.buffer,
            "NHD",
            use_tensor_cores=heads.heads // heads.kv_heads >= TENSOR_CORES_FROM,
            **buffers,
        )
        return DecodeWrapper(wrapper, self.workspace, arguments, static=kind.static)


def _eager_floats(head_dim: int, device: torch.device) -> int:
    """An upper bound of the float workspace, in bytes, for plans without static buffers.

    Without CUDA graphs fa2 splits KV only if it has at most 2 * SMs / kv_heads tiles. A tile has at most 128 rows:
    query rows times the query heads of one KV head. So the bound does not depend on the number of heads
    (PrefillPlanImpl in flashinfer/attention/scheduler.cuh).
    """
    if device.type != "cuda":
        return 0
    tiles = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return tiles * 128 * (head_dim + 1) * 4 + 1024
