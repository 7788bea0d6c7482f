"""FlashInfer's paged wrappers, as this package uses them: page size 1, lengths from the host, slots filled in later.

What the sources of 0.7.2.post1 say, and what rests on it here:

* `plan` reads lengths on the host. All its metadata are CPU tensors, so that nothing is copied from the device.
* Slots need not be known to plan: with CUDA graphs a wrapper copies the indices it is given into its buffer, so an
  empty slice leaves our buffer alone; without, it keeps the device tensor itself. Either way `run` reads what `bind`
  has written there. (fa2 and fa3 read indices nowhere else. Backends that build block tables from them are not used.)
* A wrapper made with a mask buffer always masks, whatever `plan` is told, and plan without a mask leaves the mask
  buffers alone. So masks never pass through plan, which would synchronize, and masked work has wrappers of its own.
* With CUDA graphs all offsets into the workspaces follow from batch size and rows, not from lengths, in fa2 as in fa3.
  fa3 would be safe in graphs, but it splits no KV and packs no query heads: for the few rows of a decoding batch fa2 is
  the better kernel. fa3 is left to FlashInfer's choice for prompt chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eagle_server.attention.workspace import Workspace

_INT_WORKSPACE = 64 << 10  # bytes, the least; wrappers are born with 8 MiB, and as much pinned host memory
_EAGER_INT_WORKSPACE = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """What plan is told of a forward, int32 on the CPU. `total` is the number of KV indices."""

    qo_indptr: Tensor  # [bs + 1]
    kv_indptr: Tensor  # [bs + 1]
    kv_lens: Tensor  # [bs]
    last_page_len: Tensor  # [bs]
    total: int

    @classmethod
    def of(cls, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Lengths:
        indptr = [0, *accumulate(kv_lens)]
        # FlashInfer counts (pages - 1) * page_size + last_page_len, with at least 0 for the first term.
        last = [min(length, 1) for length in kv_lens]
        qo_indptr = [0, *accumulate(q_lens)]
        return cls(_ints(qo_indptr), _ints(indptr), _ints(kv_lens), _ints(last), indptr[-1])


class Fence:
    """Until when the pinned memory of a wrapper's last plan is still being copied to the device."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def set(self) -> None:
        if self._event is not None:
            self._event.record()


@dataclass(frozen=True)
class Heads:
    """What plan is told of the model."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class PagedWrapper:
    """One planned attention over a `KVPool`: FlashInfer's wrapper, its workspaces, and what all its plans are told."""

    def __init__(self, wrapper: Any, workspace: Workspace, arguments: dict[str, Any], *, static: bool) -> None:
        self._wrapper, self._workspace, self._arguments, self._static = wrapper, workspace, arguments, static
        self._ints: Tensor | None = None  # the int workspace, once it is ours
        self._float = workspace.buffer
        self.fence = Fence(workspace.device)

    def plan(self, lengths: Lengths, indices: Tensor) -> None:
        """Plan one forward. `indices` int32 is where `bind` will write its slots."""
        self.fence.wait()
        metadata = self._metadata(lengths, indices[:0] if self._static else indices[: lengths.total])
        if self._ints is None or not self._static or self._float is not self._workspace.buffer:
            self._fit(metadata)
        self._wrapper.plan(*metadata, **self._arguments)
        self.fence.set()

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """q [T, heads, head_dim] over pools [slots, kv_heads, *] into `out`, and the base-2 LSE into `lse`."""
        cache = (keys.unsqueeze(1), values.unsqueeze(1))  # [slots, page size 1, kv_heads, *]
        if lse is None:
            self._wrapper.run(q, cache, out=out)
        else:
            self._wrapper.run(q, cache, out=out, lse=lse, return_lse=True)

    def _metadata(self, lengths: Lengths, indices: Tensor) -> tuple[Tensor, ...]:
        return lengths.qo_indptr, lengths.kv_indptr, indices, lengths.last_page_len

    def _fit(self, metadata: tuple[Tensor, ...]) -> None:
        """Give the wrapper workspaces of the size that its plan needs."""
        try:
            floats, ints = self._wrapper.workspace_size(*metadata, **self._arguments)
        except NotImplementedError:  # fa3, which needs no float workspace and little of the 8 MiB it is born with
            self._float = self._workspace.buffer
            return
        self._workspace.require(floats)
        least = _INT_WORKSPACE if self._static else _EAGER_INT_WORKSPACE
        if self._ints is None or self._ints.numel() < ints:
            self._ints = torch.empty(max(ints, least), dtype=torch.uint8, device=self._workspace.device)
        elif self._float is self._workspace.buffer:
            return
        self._float = self._workspace.buffer
        self._wrapper.reset_workspace_buffer(self._float, self._ints)


class DecodeWrapper(PagedWrapper):
    """The same for one query row per request (or beam)."""

    def _metadata(self, lengths: Lengths, indices: Tensor) -> tuple[Tensor, ...]:
        return lengths.kv_indptr, indices, lengths.last_page_len


def plan_arguments(heads: Heads, scale: float, window: int) -> dict[str, Any]:
    """What prefill and decode plans have in common. `window` counts the query's own position; 0: everything."""
    return {
        "num_qo_heads": heads.heads,
        "num_kv_heads": heads.kv_heads,
        "page_size": 1,
        "pos_encoding_mode": "NONE",
        "window_left": window - 1 if window else -1,
        "q_data_type": heads.dtype,
        "kv_data_type": heads.dtype,
        "o_data_type": heads.dtype,
        "sm_scale": scale,
    }


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
