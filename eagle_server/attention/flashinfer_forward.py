"""What the FlashInfer backends have in common: which wrapper serves which forward, and the two steps of planning one.

Static buffers and CUDA graphs: forwards with as many query rows for every request (`AttentionLimits.graph_rows`) and a
batch size of `AttentionLimits.graph_batches` get wrappers of their own, made once and found again by `graph_key`.
`plan` plans them on the host before every forward; a graph captured with `bind` and `run` of the first such forward
replays for all later ones, because every address stays, and lengths, slots and masks are read from device memory. All
other forwards borrow wrappers that return when they are done.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_server.attention.flashinfer_scratch import AttentionLimits, Mode, Scratch, TreeBlock, tree_block
from eagle_server.attention.flashinfer_wrappers import Fence, Lengths
from eagle_server.attention.interface import AttentionBatch, Causal, LayerSpec, Layout, TreeMask
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import Pool
from eagle_server.ops.tree_attention import tree_block_attention

LONG_ROWS = 64  # a causal forward with a request of at least so many rows is one of prompt chunks


@dataclass(frozen=True)
class Form:
    """What a wrapper is made for: wrappers of one form are interchangeable. batch 0: any."""

    mode: Mode
    spec: tuple[float, int]  # scale, sliding window
    batch: int = 0
    rows: int = 0
    static: bool = False
    long: bool = False  # prompt chunks, where another kernel may be the best


class Wrapper(Protocol):
    """`PagedWrapper`, or MLA's."""

    fence: Fence

    def plan(self, lengths: Lengths, indices: Tensor) -> None: ...

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None = None) -> None: ...


class FlashInferBackend(ABC):
    """`AttentionBackend` over one pool; a subclass says how a forward is computed and makes the wrappers."""

    def __init__(
        self, pool: Pool, workspace: Workspace, specs: Collection[tuple[float, int]], limits: AttentionLimits
    ) -> None:
        self.pool, self.workspace, self.limits = pool, workspace, limits
        self.specs = tuple(dict.fromkeys(specs))
        self.scratch = Scratch(limits, pool.keys[0].device)
        self._kept: dict[Hashable, _Kept] = {}
        self._free: defaultdict[Form, list[Wrapper]] = defaultdict(list)

    @abstractmethod
    def mode(self, layout: Layout, sliding: int) -> Mode:
        """How layers with this sliding window compute the forward."""

    @abstractmethod
    def make(self, form: Form) -> Wrapper:
        """A new wrapper."""

    def plan(self, layout: Layout) -> FlashInferPlan:
        """See `AttentionBackend.prepare`.

        Raises:
            ValueError: the forward is larger than `limits`.
        """
        self._check(layout)
        batch, rows, limits = len(layout.q_lens), layout.q_len or 0, self.limits
        static = batch in limits.graph_batches and rows in limits.graph_rows
        modes = tuple(self.mode(layout, sliding) for _, sliding in self.specs)
        both = zip(self.specs, modes, strict=True)
        forms = tuple(self._form(layout, spec, mode, static=static) for spec, mode in both)
        key = (modes, batch, rows, layout.window, layout.seen) if static else None
        kept = None
        if key is None:
            wrappers = tuple(self._borrow(form) for form in forms)
        else:
            kept = self._kept.get(key)
            if kept is None:
                kept = self._kept[key] = _Kept(tuple(self.make(form) for form in forms))
            kept.plans += 1
            wrappers = kept.wrappers
        for wrapper, (lengths, slots) in zip(wrappers, _planned(self.scratch, layout, modes), strict=True):
            wrapper.plan(lengths, slots)
        prepared = FlashInferPlan(self, layout, modes, wrappers, key, kept)
        if key is None:
            for form, wrapper in zip(forms, wrappers, strict=True):
                weakref.finalize(prepared, self._free[form].append, wrapper).atexit = False
        return prepared

    def _form(self, layout: Layout, spec: tuple[float, int], mode: Mode, *, static: bool) -> Form:
        batch, rows = len(layout.q_lens), layout.q_len or 0
        # A masked wrapper keeps our buffers only if it believes in CUDA graphs, for one batch size and number of rows.
        if static or mode == "mask":
            return Form(mode, spec, batch, rows, static=True)
        return Form(mode, spec, long=mode == "prefill" and max(layout.q_lens) >= LONG_ROWS)

    def _borrow(self, form: Form) -> Wrapper:
        """A wrapper that nobody uses. Waiting for the device would cost more than another wrapper."""
        free = self._free[form]
        for i, wrapper in enumerate(free):
            if wrapper.fence.passed():
                return free.pop(i)
        return self.make(form)

    def _check(self, layout: Layout) -> None:
        batch, longest, limits = len(layout.q_lens), max(layout.kv_lens), self.limits
        if batch > limits.batch or longest > limits.kv_len:
            raise ValueError(
                f"a forward of {batch} requests over up to {longest} slots: buffers were made for {limits.batch} "
                f"requests of {limits.kv_len}"
            )
        if layout.window is not None and layout.q_len is None:
            raise ValueError(f"under a tree mask all requests have as many rows, not {layout.q_lens}")


@dataclass
class _Kept:
    """The wrappers of one graph key, and how often they were planned."""

    wrappers: tuple[Wrapper, ...]
    plans: int = 0


class FlashInferPlan:
    """See `AttentionPlan`. Wrappers and modes are by spec, in the backend's order."""

    def __init__(  # noqa: PLR0913, PLR0917  made in one place
        self,
        backend: FlashInferBackend,
        layout: Layout,
        modes: tuple[Mode, ...],
        wrappers: tuple[Wrapper, ...],
        graph_key: Hashable | None,
        kept: _Kept | None,
    ) -> None:
        self.backend, self.layout, self.modes, self.wrappers = backend, layout, modes, wrappers
        self.graph_key = graph_key
        self._kept, self._plan = kept, kept.plans if kept else 0
        self._bound = False
        self.token = object()  # stands for this forward where keeping the forward itself alive would keep its wrappers

    def bind(self, batch: AttentionBatch) -> BoundFlashInfer:
        """Write the forward's slots and masks. Of the layout it uses only what `graph_key` stands for."""
        if self._kept is not None and not self._bound and self._plan != self._kept.plans:
            raise RuntimeError(
                "a forward was prepared again before this one, with the same graph key, was bound: forwards that are "
                "prepared together need layouts that differ, as draft steps do in `seen`"
            )
        self._bound = True
        backend = self.backend
        backend.scratch.owner = self.token
        expected = Causal if self.layout.window is None else TreeMask
        if not isinstance(batch.mask, expected):
            raise TypeError(f"planned for {expected.__name__}, got {type(batch.mask).__name__}")
        for mode in dict.fromkeys(self.modes):
            backend.scratch.write_slots(mode, batch)
        tree = None
        if isinstance(batch.mask, TreeMask):
            slidings = [s for (_, s), mode in zip(backend.specs, self.modes, strict=True) if mode == "mask"]
            for sliding in dict.fromkeys(slidings):
                backend.scratch.write_mask(batch, batch.mask, sliding)
            if "cascade" in self.modes:
                tree = tree_block(batch, batch.mask)
        return BoundFlashInfer(self, batch.out_cache_loc, tree)


@dataclass(frozen=True)
class BoundFlashInfer:
    """One planned forward; see `BoundAttention`."""

    prepared: FlashInferPlan
    out_cache_loc: Tensor
    tree: TreeBlock | None

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.run`."""
        backend = self.prepared.backend
        if backend.scratch.owner is not self.prepared.token:
            raise RuntimeError("another forward of this backend was bound meanwhile; bind it after this one has run")
        pool = backend.pool
        pool.write(layer.index, self.out_cache_loc, k, v)
        keys, values = pool.keys[layer.index], pool.values[layer.index]
        try:
            spec = backend.specs.index((layer.scale, layer.window))
        except ValueError:
            raise ValueError(f"the backend was built for {backend.specs}, not for {layer}") from None
        wrapper = self.prepared.wrappers[spec]
        out = q.new_empty(*q.shape[:2], values.shape[2])
        if self.prepared.modes[spec] != "cascade":
            wrapper.run(q, keys, values, out)
            return out
        assert self.tree is not None
        prefix = torch.empty_like(out)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        wrapper.run(q, keys, values, prefix, lse)
        tree_block_attention(q, keys, values, self.tree.slots, self.tree.mask, layer.scale, (prefix, lse), out)
        return out


def _planned(scratch: Scratch, layout: Layout, modes: Sequence[Mode]) -> list[tuple[Lengths, Tensor]]:
    """Per mode, what plan is told: lengths, and where the slots will stand."""
    made: dict[Mode, tuple[Lengths, Tensor]] = {}
    for mode in modes:
        if mode not in made:
            made[mode] = (
                _lengths(layout, mode),
                scratch.slots(mode, len(layout.q_lens), layout.q_len or 0),
            )
    return [made[mode] for mode in modes]


def _lengths(layout: Layout, mode: Mode) -> Lengths:
    if mode == "cascade":
        assert layout.window is not None
        return Lengths.of(layout.q_lens, [n - layout.window for n in layout.kv_lens])
    if mode == "beams":
        assert layout.window is not None and layout.seen is not None and layout.q_len is not None
        hidden = layout.window - layout.seen
        kv_lens = [n - hidden for n in layout.kv_lens for _ in range(layout.q_len)]
        return Lengths.of([1] * len(kv_lens), kv_lens)
    return Lengths.of(layout.q_lens, layout.kv_lens)
