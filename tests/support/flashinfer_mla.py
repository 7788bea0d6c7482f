"""FlashInfer's MLA wrapper in plain torch. flashinfer_emulation.py describes its behaviour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.flashinfer_log import Log, attend, causal, everything, logged


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    """The plan's int workspace holds the lengths. `run` reads only `kv_indices` from the caller's buffer."""

    log: Log

    @logged
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._graph = use_cuda_graph
        self._buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._frozen: dict[str, Any] | None = None

    @logged
    def plan(
        self,
        *,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        metadata: MLAPlanMetadata,
        query_layout: str = "packed",
        kv_cache_layout: str = "packed",
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
    ) -> None:
        m = metadata
        for tensor in (m.qo_indptr, m.kv_indptr, m.kv_indices, m.kv_len_arr):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.dim() == 1
        if int(m.kv_indptr[-1]) > len(m.kv_indices):
            raise ValueError(f"kv_indices metadata has {len(m.kv_indices)} entries but kv_indptr[-1] is larger")
        if not torch.equal(m.kv_indptr.diff(), -(-m.kv_len_arr // page_size)):
            raise ValueError("CSR metadata page counts in kv_indptr must equal ceil(kv_len_arr / page_size).")
        assert (query_layout, kv_cache_layout, page_size) == ("packed", "packed", 1)
        constants = {
            "rows": int(m.qo_indptr[-1]),
            "dims": (num_heads, head_dim_ckv, head_dim_kpe),
            "causal": causal,
            "sm_scale": sm_scale,
            "dtypes": (q_data_type, kv_data_type, output_dtype or q_data_type),
            "lse_mode": lse_mode,
        }
        self._indices = m.kv_indices
        if self._graph:
            assert self._frozen in (None, constants), "a captured graph holds other constants"
            self._frozen = constants
            sources = (m.qo_indptr, m.kv_indptr, m.kv_indices, m.kv_len_arr)
            for buffer, source in zip(self._buffers, sources, strict=True):
                assert buffer is not None and buffer.dtype == torch.int32
                overlap = buffer.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
                assert not overlap or buffer.data_ptr() == source.data_ptr()
                buffer[: len(source)].copy_(source)
            assert self._buffers[2] is not None
            self._indices = self._buffers[2]
        self._constants, self._qo_indptr, self._kv_indptr = constants, m.qo_indptr.clone(), m.kv_indptr.clone()

    @logged
    def run(
        self,
        *,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        constants = self._constants
        heads, rank, rope = constants["dims"]
        assert query.shape[1:] == (heads, rank + rope) and kv_cache.shape[1:] == (1, rank + rope)
        assert out is not None and out.shape == (len(query), heads, rank)
        assert (query.dtype, kv_cache.dtype, out.dtype) == constants["dtypes"]
        if (constants["lse_mode"] != "none") != (return_lse or lse is not None):
            raise ValueError("LSE mode does not match the plan")
        assert len(query) == constants["rows"]
        for request in range(len(self._qo_indptr) - 1):
            rows = slice(int(self._qo_indptr[request]), int(self._qo_indptr[request + 1]))
            slots = self._indices[int(self._kv_indptr[request]) : int(self._kv_indptr[request + 1])].long()
            keys, mine = kv_cache[slots], query[rows]
            visible = (causal if constants["causal"] else everything)(len(mine), len(keys))
            part, part_lse = attend(mine, keys, keys[..., :rank], visible, constants["sm_scale"])
            out[rows] = part
            if lse is not None:
                lse[rows] = part_lse * (math.log(2) if constants["lse_mode"] == "basee" else 1)
        return (out, lse) if return_lse else out
