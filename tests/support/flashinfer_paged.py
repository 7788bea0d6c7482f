"""FlashInfer's paged prefill and decode wrappers in plain torch. flashinfer_emulation.py describes their behaviour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.flashinfer_log import Log, attend, causal, everything, logged
from tests.support.flashinfer_planner import Paged, Planned, run_plan, write_plan

BORN_INT_WORKSPACE = 8 << 20
SMS = 6  # multiprocessors: so few that some batches of tests fill them


def _lengths(kv_indptr: Tensor, last_page_len: Tensor) -> Tensor:
    """Of page size 1."""
    return (kv_indptr.diff() - 1).clamp(min=0) + last_page_len


class _Paged:
    """The common part of prefill and decode wrappers. `plan` sets the attributes without a default."""

    log: Log
    sms = SMS

    def _start(self, workspace: Tensor, layout: str, graph: bool, buffers: dict[str, Tensor | None]) -> None:
        assert layout == "NHD"
        self._float, self._ints = workspace, torch.empty(BORN_INT_WORKSPACE, dtype=torch.uint8)
        self._graph, self._buffers = graph, buffers
        self._frozen: dict[str, Any] | None = None
        if graph:
            for name, buffer in buffers.items():
                if buffer is None:
                    raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
                assert buffer.dtype == torch.int32

    @logged
    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._float, self._ints = float_workspace_buffer, int_workspace_buffer

    def _size(self, batch: int, rows: int, heads: int, dim: int) -> tuple[int, int]:
        return (batch + 3) * heads * (dim + 1) * 4, 128 * batch + 8 * rows + 64

    def _stage(self, named: dict[str, Tensor], kv_indptr: Tensor, last: Tensor, constants: dict[str, Any]) -> None:
        """Copy metadata as the real plan does, and record the lengths of the schedule."""
        batch = len(kv_indptr) - 1
        needed = self._size(batch, constants["rows"], constants["heads"], constants["dim"])
        if self._float.numel() < needed[0] or self._ints.numel() < needed[1]:
            raise RuntimeError(f"Buffer overflow when allocating memory: {needed} bytes are needed")
        for name, tensor in named.items():
            if not name.endswith("indices"):
                assert tensor.device.type == "cpu" and tensor.dtype == torch.int32, f"{name}: a copy to the host"
        if not self._graph:
            self._buffers = dict(named)  # the real `.to(device)` does not copy a tensor that is already there
        else:
            fixed = len(next(b for n, b in self._buffers.items() if b is not None and "last_page" in n))
            if batch != fixed:
                raise ValueError(f"The batch size should be fixed, the runtime batch size {batch} mismatches {fixed}")
            if self._frozen not in (None, constants):
                raise AssertionError(f"a captured graph holds {self._frozen}, this plan has {constants}")
            self._frozen = constants
            for name, tensor in named.items():
                buffer = self._buffers[name]
                assert buffer is not None
                if len(tensor) > len(buffer):
                    raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
                buffer[: len(tensor)].copy_(tensor)
        self._scheduled = kv_indptr.clone()
        assert constants["page_size"] == 1
        self._kv_lens = _lengths(kv_indptr, last)
        self._constants = constants

    def _gather(self, cache: Tensor, request: int, indptr: Tensor, indices: Tensor) -> Tensor:
        """The keys or values of one request [kv_len, h, *], from a paged cache."""
        pages = indices[int(indptr[request]) : int(indptr[request + 1])].long()
        return cache[pages].flatten(0, 1)[: int(self._kv_lens[request])]

    def _check_run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        constants = self._constants
        for tensor, dtype, name in (
            (q, constants["q"], "q"),
            (cache[0], constants["kv"], "k"),
            (out, constants["o"], "out"),
        ):
            if tensor.dtype != dtype:
                raise ValueError(
                    f"The dtype of {name} {tensor.dtype} does not match {dtype} specified in plan function."
                )
        assert out.shape == (*q.shape[:2], cache[1].shape[3])
        assert q.stride(-1) == 1 and cache[0].stride() == cache[1].stride()
        assert cache[0].shape[1] == 1

    def _attend(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        rows: tuple[int, int],
        request: int,
        names: tuple[str, str],
        visible: Callable[[int, int], Tensor],
    ) -> tuple[Tensor, Tensor]:
        indptr, indices = (self._buffers[name] for name in names)
        assert indptr is not None and indices is not None
        k, v = (self._gather(c, request, indptr, indices) for c in cache)
        mine, window = q[rows[0] : rows[1]], self._constants["window_left"]
        seen = visible(len(mine), len(k))
        if window >= 0:
            at = torch.arange(len(mine))[:, None] + len(k) - len(mine)
            seen = seen & (torch.arange(len(k)) + window >= at)
        return attend(mine, k, v, seen, self._constants["sm_scale"])


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    @logged
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "qo_indptr": qo_indptr_buf,
            "paged_kv_indptr": paged_kv_indptr_buf,
            "paged_kv_indices": paged_kv_indices_buf,
            "paged_kv_last_page_len": paged_kv_last_page_len_buf,
        }
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self._plan_info: list[int] = []
        self._captured: list[int] | None = None
        # Without graph mode, plan drops the mask buffers and so the mask.
        self._mask = (custom_mask_buf, mask_indptr_buf) if use_cuda_graph and custom_mask_buf is not None else None
        assert backend == "fa2" or (backend == "fa3" and not self._mask)

    @logged
    def workspace_size(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> tuple[int, int]:
        rows = int(qo_indptr[-1])
        floats, ints = self._size(len(qo_indptr) - 1, rows, num_qo_heads, head_dim_qk)
        heads = num_qo_heads, num_kv_heads, head_dim_qk
        given = self._planned(heads, window_left, uniform_q_len, disable_split_kv=disable_split_kv)
        kv_lens = _lengths(paged_kv_indptr, paged_kv_last_page_len)
        *_, taken = write_plan(None, qo_indptr, kv_lens, given, rows)
        return floats, max(ints, taken)

    @logged
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        assert pos_encoding_mode == "NONE" and sm_scale is not None
        rows = int(qo_indptr[-1])
        if self._graph and self._frozen and rows > self._frozen["rows"]:
            raise ValueError(f"The total number of rows {rows} in cuda graph mode cannot exceed {self._frozen['rows']}")
        if self._graph and uniform_q_len is not None:
            assert bool((qo_indptr.diff() == uniform_q_len).all()), "uniform_q_len does not describe this batch"
        named = {
            "qo_indptr": qo_indptr,
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        constants = {
            "rows": rows,
            "heads": num_qo_heads,
            "kv_heads": num_kv_heads,
            "dim": head_dim_qk,
            "page_size": page_size,
            "causal": causal,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "q": q_data_type,
            "kv": kv_data_type or q_data_type,
            "o": o_data_type or q_data_type,
        }
        self._stage(named, paged_kv_indptr, paged_kv_last_page_len, constants)
        heads = num_qo_heads, num_kv_heads, head_dim_qk
        given = self._planned(heads, window_left, uniform_q_len, disable_split_kv=disable_split_kv)
        *self._plan_info, _ = write_plan(self._ints, qo_indptr, self._kv_lens, given, rows)

    def _planned(
        self, heads: tuple[int, int, int], window: int, uniform_q_len: int | None, *, disable_split_kv: bool
    ) -> Planned:
        uniform = uniform_q_len or 0
        return Planned(*heads, self.sms, self._graph, window, disable_split_kv, uniform if self._graph else 0)

    @logged
    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        qo_indptr = self._buffers["qo_indptr"]
        assert qo_indptr is not None and out is not None and not args
        if len(q) != int(qo_indptr[-1]):
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({int(qo_indptr[-1])}).")
        self._check_run(q, paged_kv_cache, out)
        if self._graph:
            assert self._captured in (None, self._plan_info), "a captured graph holds other offsets"
            self._captured = self._plan_info
        keys, values = (cache.flatten(0, 1) for cache in paged_kv_cache)
        lengths = self._buffers["paged_kv_indptr"], self._buffers["paged_kv_indices"]
        paged = Paged(keys, values, qo_indptr, *lengths, self._buffers["paged_kv_last_page_len"])  # type: ignore[arg-type]
        window, scale = self._constants["window_left"], self._constants["sm_scale"]
        found, found_lse = run_plan(self._ints, self._plan_info, q, paged, self._visible, window, scale)
        out.copy_(found)
        if return_lse:
            assert lse is not None and lse.dtype == torch.float32
            lse.copy_(found_lse)
        return (out, lse) if return_lse else out

    def _visible(self, request: int, rows: int, columns: int) -> Tensor:
        if self._mask is None:
            return (causal if self._constants["causal"] else everything)(rows, columns)
        # MaskMode.CUSTOM: byte custom_mask + mask_indptr[request], bit qo * kv_len + kv, little-endian.
        bits, indptr = self._mask
        assert bits is not None and bits.dtype == torch.uint8
        assert indptr is not None and indptr.dtype == torch.int32
        offset = torch.arange(rows * columns)
        place = int(indptr[request]) + offset // 8
        return (bits[place] >> (offset % 8) & 1).bool().view(rows, columns)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    @logged
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "indptr": paged_kv_indptr_buffer,
            "indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self._tensor_cores = use_tensor_cores

    @logged
    def workspace_size(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> tuple[int, int]:
        return self._size(len(last_page_len), len(last_page_len), num_qo_heads, head_dim)

    @logged
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        assert pos_encoding_mode == "NONE" and sm_scale is not None
        assert self._tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
        constants = {
            "rows": len(last_page_len),
            "heads": num_qo_heads,
            "kv_heads": num_kv_heads,
            "dim": head_dim,
            "page_size": page_size,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "q": q_data_type,
            "kv": kv_data_type or q_data_type,
            "o": o_data_type or q_data_type,
        }
        named = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        self._stage(named, indptr, last_page_len, constants)

    @logged
    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        indptr = self._buffers["indptr"]
        assert indptr is not None and out is not None and not args
        assert torch.equal(indptr, self._scheduled), "the plan's schedule is for other lengths"
        self._check_run(q, paged_kv_cache, out)
        if len(q) != len(indptr) - 1:
            raise ValueError(f"q implies q_len_per_req={len(q) / (len(indptr) - 1)} but plan() used 1")
        for request in range(len(q)):
            rows = request, request + 1
            part, part_lse = self._attend(q, paged_kv_cache, rows, request, ("indptr", "indices"), everything)
            out[request] = part[0]
            if return_lse:
                assert lse is not None
                lse[request] = part_lse[0]
        return (out, lse) if return_lse else out
