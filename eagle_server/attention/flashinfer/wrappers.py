"""FlashInfer's paged wrappers for prefill and decode: page size 1, lengths from the host, slots written after plan.

Facts from the sources of 0.7.2.post1, and how this package uses them:

* `plan` reads lengths on the host. All our metadata are CPU tensors, so nothing is copied from the device. A captured
  prefill is planned by a kernel of our own, because the kernels read the plan in device memory.
* `plan` does not need the slots. With CUDA graphs a wrapper copies the given indices into its buffer, so an empty slice
  leaves our buffer unchanged. Without graphs it keeps the device tensor itself. In both cases `run` reads the slots
  that `bind` wrote there. (fa2 and fa3 read indices nowhere else. We do not use backends that build block tables.)
* A wrapper made with a mask buffer always masks, whatever arguments `plan` gets. `plan` without a mask leaves the mask
  buffers unchanged. We never pass masks to `plan`, because that would synchronize. Masked forwards have their own
  wrappers.
* With CUDA graphs fa2's planner splits KV into as many chunks as the device has room for, and a second kernel merges
  them even if each row has only one. If the tiles of query rows alone fill the device, it never splits.
* fa2's kernels count the chunks of a request twice: in the plan, and from the length on the device. If both differ, all
  rows but the first are merged from wrong places. So a plan for longer requests is no bound: it is wrong.
* With CUDA graphs all offsets into the workspaces depend on batch size and rows, not on lengths, in fa2 and in fa3. So
  fa3 would be safe in graphs. But it does not split KV and does not pack query heads, so fa2 is the better kernel for
  the few rows of a decoding batch. Prompt chunks take fa3 where it can be loaded.
* With backend="auto", `workspace_size` chooses between fa2 and fa3 without the head size, but `plan` with it. So we
  always name the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eagle_server.attention.workspace import Workspace
from eagle_server.ops.kv.prefill_plan import PrefillPlan, plan_prefill

_INT_WORKSPACE = 64 << 10  # bytes, the minimum; a new wrapper has 8 MiB, and as much pinned host memory
_EAGER_INT_WORKSPACE = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """The lengths of a forward as plan takes them, int32 on the CPU. `total` is the number of KV indices."""

    qo_indptr: Tensor  # [bs + 1]
    kv_indptr: Tensor  # [bs + 1]
    kv_lens: Tensor  # [bs]
    last_page_len: Tensor  # [bs]
    total: int

    @classmethod
    def of(cls, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Lengths:
        indptr = [0, *accumulate(kv_lens)]
        # FlashInfer computes a length as max(pages - 1, 0) * page_size + last_page_len.
        last = [min(length, 1) for length in kv_lens]
        qo_indptr = [0, *accumulate(q_lens)]
        return cls(_ints(qo_indptr), _ints(indptr), _ints(kv_lens), _ints(last), indptr[-1])


class Fence:
    """Tells whether the pinned memory of a wrapper's last plan has been copied to the device."""

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
    """The model's head counts, head size and dtype, as plan takes them."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class PagedWrapper:
    """Attention over a `KVPool`: FlashInfer's prefill wrapper, its workspaces, and the arguments of all its plans."""

    def __init__(self, wrapper: Any, workspace: Workspace, arguments: dict[str, Any], *, static: bool) -> None:
        self._wrapper, self._workspace, self._arguments, self._static = wrapper, workspace, arguments, static
        self._ints: Tensor | None = None  # our int workspace; None: still the wrapper's own
        self._float = workspace.buffer
        self.fence = Fence(workspace.device)

    @property
    def is_planned(self) -> bool:
        """Whether the host need not plan the next forward."""
        return False

    def plan(self, lengths: Lengths, indices: Tensor) -> None:
        """Plan one forward. `bind` will write its slots to `indices`, int32."""
        self.fence.wait()
        metadata = self._metadata(lengths, indices[:0] if self._static else indices[: lengths.total])
        if self._ints is None or not self._static or self._float is not self._workspace.buffer:
            self._fit(metadata)
        self._wrapper.plan(*metadata, **self._arguments)
        self.fence.set()

    def plan_on_device(self, kv_indptr: Tensor) -> None:
        """Plan for lengths on the device, int32 [bs + 1], if the host has not planned for them."""

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend with q [T, heads, head_dim] over pools [slots, kv_heads, *].

        Writes `out`, and the base-2 LSE to `lse`.
        """
        cache = (keys.unsqueeze(1), values.unsqueeze(1))  # [slots, page size 1, kv_heads, *]
        if lse is None:
            self._wrapper.run(q, cache, out=out)
        else:
            self._wrapper.run(q, cache, out=out, lse=lse, return_lse=True)

    def _metadata(self, lengths: Lengths, indices: Tensor) -> tuple[Tensor, ...]:
        return lengths.qo_indptr, lengths.kv_indptr, indices, lengths.last_page_len

    def _fit(self, metadata: tuple[Tensor, ...]) -> None:
        """Replace the wrapper's workspaces by ones of the size that its plan needs."""
        try:
            floats, ints = self._wrapper.workspace_size(*metadata, **self._arguments)
        except NotImplementedError:  # fa3 needs no float workspace, and little of its initial 8 MiB of int workspace
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


class StaticWrapper(PagedWrapper):
    """A prefill wrapper with static buffers: its forwards have equal batch sizes and numbers of rows per request.

    The host plans it once. Then a kernel plans each forward from lengths on the device (`ops/kv/prefill_plan.py`). If
    the tiles of query rows alone fill the device, the plan splits no KV, and no kernel merges chunks.

    Args:
        lengths: the wrapper's buffers kv_indptr and last_page_len, int32 [bs + 1] and [bs].
        longest: KV slots of the longest request.
    """

    def __init__(
        self,
        wrapper: Any,
        workspace: Workspace,
        arguments: dict[str, Any],
        lengths: tuple[Tensor, Tensor],
        longest: int,
    ) -> None:
        super().__init__(wrapper, workspace, arguments, static=True)
        self._lengths, self._longest = lengths, longest
        self._plan: PrefillPlan | None = None

    @property
    def is_planned(self) -> bool:
        """See `PagedWrapper.is_planned`."""
        return self._plan is not None and self._float is self._workspace.buffer

    def plan(self, lengths: Lengths, indices: Tensor) -> None:
        """See `PagedWrapper.plan`."""
        super().plan(lengths, indices)
        self._plan = self._planned()
        if self._plan.fills_device and "disable_split_kv" not in self._arguments:
            self._arguments["disable_split_kv"] = True
            super().plan(lengths, indices)
            self._plan = self._planned()

    def plan_on_device(self, kv_indptr: Tensor) -> None:
        """See `PagedWrapper.plan_on_device`."""
        assert self._plan is not None
        plan_prefill(kv_indptr, self._plan)

    def _planned(self) -> PrefillPlan:
        assert self._ints is not None
        info = tuple(int(number) for number in self._wrapper._plan_info)
        given = self._arguments
        rows, group = given["uniform_q_len"], given["num_qo_heads"] // given["num_kv_heads"]
        return PrefillPlan.of(self._ints, info, self._lengths, rows, group, given["window_left"], self._longest)


class DecodeWrapper(PagedWrapper):
    """FlashInfer's decode wrapper: one query row per request (or beam)."""

    def _metadata(self, lengths: Lengths, indices: Tensor) -> tuple[Tensor, ...]:
        return lengths.kv_indptr, indices, lengths.last_page_len


def plan_arguments(heads: Heads, scale: float, window: int) -> dict[str, Any]:
    """Arguments that prefill and decode plans share. `window` counts the query's own position; 0: no window."""
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
