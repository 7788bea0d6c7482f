"""The real FlashInfer's Python code, with its compiled modules replaced."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.flashinfer_log import attend, everything
from tests.support.flashinfer_log import causal as causal_mask
from tests.support.flashinfer_paged import SMS
from tests.support.flashinfer_planner import Paged, Planned, run_plan, write_plan

CUSTOM = 2  # MaskMode
FA3_ARGUMENTS = 16  # of its planner, which is not emulated


def real_flashinfer() -> Any:
    """The installed FlashInfer; without it the test is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
        __import__("flashinfer.mla")
    return module


@dataclass
class Kernels:
    """Stand-ins for FlashInfer's compiled modules. They attend with exactly the tensors that they get."""

    plans: list[tuple[Any, ...]] = field(default_factory=list)
    mask_modes: list[int] = field(default_factory=list)
    masks: list[tuple[Tensor | None, Tensor | None]] = field(default_factory=list)
    backends: set[str] = field(default_factory=set)
    head_dims: set[int] = field(default_factory=set)

    def prefill(self, backend: str, *args: Any) -> Any:
        self.backends.add(backend)
        self.head_dims.update(args[4:6])
        sizes = None if backend == "fa3" else self.size  # as in the real module
        return SimpleNamespace(plan=self.plan, workspace_size=sizes, paged_run=self.paged_run)

    def size(self, *args: Any) -> tuple[int, int]:
        return 4096, 4096

    def plan(self, *args: Any) -> list[int]:
        self.plans.append(args)
        ints, _, qo_indptr, _, kv_lens, total_rows, _, heads, kv_heads, page_size, graph, dim, _, _, window = args[1:16]
        for tensor in args[3:6]:
            assert tensor.device.type == "cpu" and tensor.dtype == torch.int32
        if len(args) == FA3_ARGUMENTS:
            return []
        fixed_split_size, disable_split_kv, colocated, uniform = args[16:]
        assert (page_size, fixed_split_size, colocated) == (1, -1, 0)
        given = Planned(heads, kv_heads, dim, SMS, graph, window, disable_split_kv, uniform)
        return write_plan(ints, qo_indptr, kv_lens, given, total_rows)[:-1]

    def paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        custom_mask: Tensor | None,
        mask_indptr: Tensor | None,
        *rest: Any,
    ) -> None:
        assert layout == 0 and k.shape[1] == 1 and k.stride() == v.stride()
        assert bool((last_page_len == (kv_indptr.diff() > 0).int()).all())
        self.mask_modes.append(mask_mode)
        self.masks.append((custom_mask, mask_indptr))
        scale = rest[5]

        def visible(request: int, n: int, m: int) -> Tensor:
            if mask_mode != CUSTOM:
                return causal_mask(n, m) if mask_mode == 1 else everything(n, m)
            assert custom_mask is not None and mask_indptr is not None
            bit = torch.arange(n * m)
            packed = custom_mask[int(mask_indptr[request]) + bit // 8]
            return (packed >> (bit % 8) & 1).bool().view(n, m)

        if plan_info:
            paged = Paged(k[:, 0], v[:, 0], qo_indptr, kv_indptr, kv_indices, last_page_len)
            found, found_lse = run_plan(int_workspace, plan_info, q, paged, visible, window_left, scale)
            out.copy_(found)
            if lse is not None:
                lse.copy_(found_lse)
            return
        for request in range(len(qo_indptr) - 1):
            rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
            slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
            n, m = rows.stop - rows.start, len(slots)
            seen = visible(request, n, m)
            if window_left >= 0:
                seen = seen & (torch.arange(m) + n + window_left >= m + torch.arange(n)[:, None])
            out[rows], part = attend(q[rows], k[slots, 0], v[slots, 0], seen, scale)
            if lse is not None:
                lse[rows] = part

    def mla(self, *args: Any) -> Any:
        self.backends.add(args[0])
        return SimpleNamespace(plan=self.mla_plan, run=self.mla_run)

    def mla_plan(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.plans.append(args)
        qo_indptr, kv_indptr, kv_lens = args[3:6]
        return qo_indptr.clone(), kv_indptr.clone(), kv_lens.clone()

    def mla_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: tuple[Tensor, Tensor, Tensor],
        q_nope: Tensor,
        q_pe: Tensor,
        ckv: Tensor,
        kpe: Tensor,
        kv_indices: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        heads: int,
        page_size: int,
        scale: float,
        base_e: bool,
        *rest: Any,
    ) -> None:
        assert (heads, page_size, base_e) == (q_nope.shape[1], 1, False)
        qo_indptr, kv_indptr, kv_lens = plan_info
        self.mask_modes.append(mask_mode)
        for request in range(len(kv_lens)):
            rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
            slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
            n, m = rows.stop - rows.start, int(kv_lens[request])
            visible = causal_mask(n, m) if mask_mode == 1 else everything(n, m)
            keys = torch.cat([ckv[slots], kpe[slots]], dim=-1)
            q = torch.cat([q_nope[rows], q_pe[rows]], dim=-1)
            out[rows], part = attend(q, keys, ckv[slots], visible, scale)
            if lse is not None:
                lse[rows] = part


def packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """flashinfer.segment_packbits on the CPU."""
    bits, ends = x.numpy(), indptr.tolist()
    parts = [np.packbits(bits[a:b], bitorder=bitorder) for a, b in zip(ends, ends[1:], strict=False)]  # type: ignore[call-overload]
    lens = torch.tensor([0, *(len(part) for part in parts)])
    return torch.from_numpy(np.concatenate(parts)), lens.cumsum(0).int()


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Let FlashInfer's Python code run on the CPU, over stand-ins. It must not choose between fa2 and fa3 itself."""
    import flashinfer.mla._batch_mla._auto_policy as policy
    import flashinfer.mla._batch_mla._backends._fa_common as fa
    import flashinfer.mla._batch_mla._backends.fa2_backend as fa2
    import flashinfer.mla._batch_mla._backends.fa3_backend as fa3
    from flashinfer import decode, prefill

    found, empty = Kernels(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    for module in (prefill, decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", found.prefill)
    monkeypatch.setattr(prefill, "determine_attention_backend", lambda *a, **k: pytest.fail("it chooses"))
    monkeypatch.setattr(prefill, "segment_packbits", packbits)
    for module in (fa2, fa3):
        monkeypatch.setattr(module, "get_batch_mla_module", found.mla)
    monkeypatch.setattr(policy, "_get_compute_capability", lambda device: (9, 0))
    for module in (policy, fa):
        monkeypatch.setattr(module, "is_sm90a_supported", lambda device: True)
    monkeypatch.setattr(fa, "get_compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(fa, "get_device_sm_count", lambda device: 132)
    monkeypatch.setattr(fa, "_get_fa_shared_memory_limits", lambda device: (233472, 232448))
    return found
