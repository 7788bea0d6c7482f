"""The base class of the FlashInfer backends, with its attention plan and bound attention: which wrapper runs what.

Static buffers and CUDA graphs. A forward may be captured if all its requests have the same number of query rows, one of
`AttentionLimits.graph_rows`, and its batch size is one of `AttentionLimits.graph_batches`. Such forwards have their own
wrappers, which are made once and looked up by `graph_key`. `plan` runs on the host before every forward and plans the
wrappers that are not `is_planned`. A graph captures `bind` and `run` of the first forward and replays for all later
ones: no address changes, and lengths, slots and masks are read from device memory. All other forwards borrow wrappers
and return them when their plan is deleted.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from eagle_server.attention.batches import CAPTURED_PIECES, MIXED_CHUNKS, PIECE_ROWS, parts_of
from eagle_server.attention.flashinfer.scratch import LONG_ROWS, AttentionLimits, Mode, Scratch, TreeBlock, window_of
from eagle_server.attention.flashinfer.wrappers import Fence, Lengths
from eagle_server.attention.interface import AttentionBatch, BoundAttention, Causal, LayerSpec, Layout, TreeMask
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import KVShape, Pool
from eagle_server.ops.layers.fused import AngleTable, Rotation
from eagle_server.ops.layers.rope_kv import HeadNorms, rotate_and_write
from eagle_server.ops.tree.attention import add_sinks, tree_block_attention
from eagle_server.ops.tree.paged import PagedRows, paged_attention


class PlanSpec(NamedTuple):
    """What a plan depends on in a layer: its scale, sliding window, shape and query heads.

    None and 0: those of all layers.
    """

    scale: float
    window: int
    shape: KVShape | None = None
    heads: int = 0


@dataclass(frozen=True)
class WrapperKind:
    """The properties that a wrapper is made for. Wrappers of one kind are interchangeable. batch 0: any batch size.

    scratch: has the buffers of a static wrapper; None: it is not static.
    """

    mode: Mode
    spec: PlanSpec
    batch: int = 0
    rows: int = 0
    scratch: Scratch | None = None
    long: bool = False  # prompt chunks, for which fa3 is taken where FlashInfer has it

    @property
    def static(self) -> bool:
        return self.scratch is not None


class Wrapper(Protocol):
    """A `PagedWrapper` or an `MLAWrapper`."""

    fence: Fence

    @property
    def is_planned(self) -> bool: ...

    def plan_on_device(self, kv_indptr: Tensor) -> None: ...

    def plan(self, lengths: Lengths, indices: Tensor) -> None: ...

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None = None) -> None: ...


class FlashInferBackend(ABC):
    """`AttentionBackend` over one pool. A subclass chooses how a forward is computed and makes the wrappers."""

    ragged_trees: ClassVar[bool] = False  # captured graphs have fixed shapes
    native_caches: ClassVar[None] = None
    plans_on_device: ClassVar[bool] = True

    def __init__(
        self, pool: Pool, workspace: Workspace, specs: Collection[tuple[Any, ...]], limits: AttentionLimits
    ) -> None:
        self.pool, self.workspace = pool, workspace
        self.specs = tuple(dict.fromkeys(PlanSpec(*spec) for spec in specs))
        self._by_shape = any(spec.shape is not None for spec in self.specs)
        self.scratch = Scratch(limits, pool.keys[0].device)
        # Of the chunks in mixed forwards. The padding of a piece may end behind the longest request.
        captured = {"graph_batches": CAPTURED_PIECES, "graph_rows": (PIECE_ROWS,)} if limits.graph_batches else {}
        chunks = AttentionLimits(MIXED_CHUNKS, limits.kv_len + PIECE_ROWS, **captured)
        self._chunks_scratch = Scratch(chunks, pool.keys[0].device)
        self._static: dict[tuple[Scratch, Hashable], _StaticWrappers] = {}
        self._free: defaultdict[WrapperKind, list[Wrapper]] = defaultdict(list)

    @abstractmethod
    def mode(self, layout: Layout, sliding: int) -> Mode:
        """The mode in which layers with this sliding window compute the forward."""

    @abstractmethod
    def make(self, kind: WrapperKind) -> Wrapper:
        """A new wrapper."""

    def key_of(self, layout: Layout) -> Hashable | None:
        """See `AttentionBackend.key_of`."""
        if not layout.chunks:
            return self._key(layout, self._modes(layout), self.scratch)
        trees, chunks = layout.parts
        own = self._key(chunks, self._modes(chunks), self._chunks_scratch)
        return _both(self._key(trees, self._modes(trees), self.scratch), own) if trees.q_lens else own

    def plan(self, layout: Layout) -> FlashInferPlan | MixedPlan:
        """See `AttentionBackend.plan`.

        Raises:
            ValueError: the forward is larger than `limits`.
        """
        if not layout.chunks:
            return self._plan(layout, self.scratch)
        trees, chunks = layout.parts
        if not trees.q_lens:
            return self._plan(chunks, self._chunks_scratch)
        return MixedPlan(self._plan(trees, self.scratch), self._plan(chunks, self._chunks_scratch))

    def _modes(self, layout: Layout) -> tuple[Mode, ...]:
        return tuple(self.mode(layout, spec.window) for spec in self.specs)

    def _key(self, layout: Layout, modes: tuple[Mode, ...], scratch: Scratch) -> Hashable | None:
        batch, rows, limits = len(layout.q_lens), layout.q_len or 0, scratch.limits
        if batch not in limits.graph_batches or rows not in limits.graph_rows:
            return None
        return modes, batch, rows, layout.mask_width, layout.num_visible

    def _plan(self, layout: Layout, scratch: Scratch) -> FlashInferPlan:
        _check(layout, scratch.limits)
        modes = self._modes(layout)
        key = self._key(layout, modes, scratch)
        shared = None if key is None else self._static.get((scratch, key))
        kinds: tuple[WrapperKind | None, ...] = ()
        if shared is None:
            both = zip(self.specs, modes, strict=True)
            kinds = tuple(self._kind(layout, spec, mode, scratch, static=key is not None) for spec, mode in both)
        if key is not None and shared is None:
            made = tuple(None if kind is None else self.make(kind) for kind in kinds)
            shared = self._static[scratch, key] = _StaticWrappers(made)
        wrappers = (
            tuple(None if kind is None else self._borrow(kind) for kind in kinds) if shared is None else shared.wrappers
        )
        pending = [
            (mode, wrapper)
            for mode, wrapper in zip(modes, wrappers, strict=True)
            if wrapper is not None and not wrapper.is_planned
        ]
        inputs = _plan_inputs(scratch, layout, [mode for mode, _ in pending])
        for (_, wrapper), (lengths, slots) in zip(pending, inputs, strict=True):
            wrapper.plan(lengths, slots)
        if shared is not None:
            shared.plans += bool(pending)
        plan = FlashInferPlan(self, scratch, layout, (modes, wrappers), key, shared)
        if key is None:
            for kind, borrowed in zip(kinds, wrappers, strict=True):
                if kind is not None and borrowed is not None:
                    weakref.finalize(plan, self._free[kind].append, borrowed).atexit = False
        return plan

    def spec_of(self, layer: LayerSpec) -> int:
        """The number of a layer's spec.

        Raises:
            ValueError: the backend was not built for it.
        """
        shape = KVShape(*self.pool.keys[layer.index].shape[1:]) if self._by_shape else None
        try:
            return self.specs.index(PlanSpec(layer.scale, layer.sliding_window, shape, layer.heads))
        except ValueError:
            raise ValueError(f"the backend was built for {self.specs}, not for {layer}") from None

    def _kind(
        self, layout: Layout, spec: PlanSpec, mode: Mode, scratch: Scratch, *, static: bool
    ) -> WrapperKind | None:
        """None: our own kernel computes it."""
        batch, rows = len(layout.q_lens), layout.q_len or 0
        if mode == "paged":
            return None
        # A masked wrapper uses our buffers only with use_cuda_graph, which fixes its batch size and number of rows.
        if static or mode == "mask":
            return WrapperKind(mode, spec, batch, rows, scratch)
        return WrapperKind(mode, spec, long=mode == "prefill" and max(layout.q_lens) >= LONG_ROWS)

    def _borrow(self, kind: WrapperKind) -> Wrapper:
        """A free wrapper, or a new one if all are in use. Waiting for the device would cost more than a new one."""
        free = self._free[kind]
        for i, wrapper in enumerate(free):
            if wrapper.fence.passed():
                return free.pop(i)
        return self.make(kind)


def _check(layout: Layout, limits: AttentionLimits) -> None:
    batch, longest = len(layout.q_lens), max(layout.kv_lens)
    if batch > limits.batch or longest > limits.kv_len:
        raise ValueError(
            f"a forward of {batch} requests over up to {longest} slots: buffers were made for {limits.batch} "
            f"requests of {limits.kv_len}"
        )
    if layout.mask_width is not None and layout.q_len is None:
        raise ValueError(f"under a tree mask all requests have as many rows, not {layout.q_lens}")


@dataclass
class _StaticWrappers:
    """The wrappers of one graph key, and how often the host has planned any of them."""

    wrappers: tuple[Wrapper | None, ...]
    plans: int = 0


class FlashInferPlan:
    """See `AttentionPlan`. There is one mode and one wrapper per spec, in the order of the backend's specs.

    Our own kernel, mode "paged", needs no wrapper.
    """

    def __init__(
        self,
        backend: FlashInferBackend,
        scratch: Scratch,
        layout: Layout,
        computed: tuple[tuple[Mode, ...], tuple[Wrapper | None, ...]],
        graph_key: Hashable | None,
        shared: _StaticWrappers | None,
    ) -> None:
        self.backend, self.scratch, self.layout, self.graph_key = backend, scratch, layout, graph_key
        self.modes, self.wrappers = computed
        self._static, self._plan = shared, shared.plans if shared else 0
        self._bound = False
        self._window: Tensor | None = None  # slots of a cascade's window, int64 [bs, W]
        self.token = object()  # identifies this plan; a reference to the plan itself would keep its wrappers in use

    def bind(self, batch: AttentionBatch) -> BoundFlashInfer:
        """Write the forward's slots and masks. It uses only those values of the layout that are in `graph_key`."""
        if self._static is not None and not self._bound and self._plan != self._static.plans:
            raise RuntimeError(
                "a forward was planned again before this one, with the same graph key, was bound: forwards that are "
                "planned together need layouts that differ, as draft steps do in `num_visible`"
            )
        self._bound = True
        scratch = self.scratch
        if batch.keeps_slots and scratch.owner is not self.token:
            raise RuntimeError("another forward was bound meanwhile, so the slots are no longer in place")
        scratch.owner = self.token
        expected = Causal if self.layout.mask_width is None else TreeMask
        if not isinstance(batch.mask, expected):
            raise TypeError(f"planned for {expected.__name__}, got {type(batch.mask).__name__}")
        if not batch.keeps_slots:
            self._window = None
            planned = [pair for pair in zip(self.modes, self.wrappers, strict=True) if pair[1] is not None]
            kv_indptr = {mode: scratch.write_slots(mode, batch) for mode in dict.fromkeys(mode for mode, _ in planned)}
            for mode, wrapper in planned:
                assert wrapper is not None
                wrapper.plan_on_device(kv_indptr[mode])
        tree, rows = None, dict[int, PagedRows]()
        if "paged" in self.modes:
            assert batch.row_slots is None, "padding of chunks is computed by FlashInfer"
            both = zip(self.backend.specs, self.modes, strict=True)
            windows = dict.fromkeys(spec.window for spec, mode in both if mode == "paged")
            rows = {window: _paged_rows(batch, window) for window in windows}
        if isinstance(batch.mask, TreeMask):
            slidings = [
                spec.window for spec, mode in zip(self.backend.specs, self.modes, strict=True) if mode == "mask"
            ]
            for sliding in dict.fromkeys(slidings):
                scratch.write_mask(batch, batch.mask, sliding)
            if "cascade" in self.modes:
                self._window = window_of(batch, batch.mask) if self._window is None else self._window
                tree = TreeBlock(self._window, batch.mask.visible)
        return BoundFlashInfer(self, batch.out_cache_loc, tree, rows, recurrent=batch.recurrent)


@dataclass(frozen=True)
class MixedPlan:
    """See `AttentionPlan`. Trees and prompt chunks are planned apart, and only their attention is computed apart."""

    trees: FlashInferPlan
    chunks: FlashInferPlan

    @property
    def graph_key(self) -> Hashable | None:
        return _both(self.trees.graph_key, self.chunks.graph_key)

    def bind(self, batch: AttentionBatch) -> BoundFlashInfer:
        """See `AttentionPlan.bind`."""
        trees, chunks = parts_of(batch)
        bound = self.trees.bind(trees)
        return replace(
            bound, out_cache_loc=batch.out_cache_loc, chunks=self.chunks.bind(chunks), recurrent=batch.recurrent
        )


@dataclass(frozen=True)
class BoundFlashInfer(BoundAttention):
    """See `BoundAttention`. `chunks`: the last rows, which are computed apart; `out_cache_loc` has them as well."""

    plan: FlashInferPlan
    out_cache_loc: Tensor
    tree: TreeBlock | None
    rows: Mapping[int, PagedRows]  # by the sliding windows of layers whose rows our own kernel computes
    chunks: BoundFlashInfer | None = None

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.run`."""
        self.plan.backend.pool.write(layer.index, self.out_cache_loc, k, v)
        return self.attend(q, layer)

    def rotate_and_attend(
        self, qkv: Tensor, heads: int, rotation: Rotation, norms: HeadNorms | None, layer: LayerSpec
    ) -> Tensor:
        """Norms, rotation and the write to the pool in one kernel, if the rotation is by a table."""
        if not isinstance(rotation, AngleTable):
            return super().rotate_and_attend(qkv, heads, rotation, norms, layer)
        pool = self.plan.backend.pool
        keys, values = pool.keys[layer.index], pool.values[layer.index]
        return self.attend(rotate_and_write(qkv, heads, rotation, keys, values, self.out_cache_loc, norms), layer)

    def attend(self, q: Tensor, layer: LayerSpec) -> Tensor:
        """See `BoundAttention.attend`."""
        if self.chunks is None:
            return self._attend(q, layer)
        trees, chunks = q.tensor_split([len(q) - len(self.chunks.out_cache_loc)])
        return torch.cat([self._attend(trees, layer), self.chunks.attend(chunks, layer)])

    def _attend(self, q: Tensor, layer: LayerSpec) -> Tensor:
        backend, pool = self.plan.backend, self.plan.backend.pool
        if self.plan.scratch.owner is not self.plan.token:
            raise RuntimeError("another forward of this backend was bound meanwhile; bind it after this one has run")
        keys, values = pool.keys[layer.index], pool.values[layer.index]
        spec = backend.spec_of(layer)
        wrapper = self.plan.wrappers[spec]
        cascades = self.plan.modes[spec] == "cascade"
        out, lse = q.new_empty(*q.shape[:2], values.shape[2]), None
        if wrapper is None:
            return paged_attention(q, keys, values, self.rows[layer.sliding_window], layer.scale, layer.sinks, out)
        if cascades or layer.sinks is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        wrapper.run(q, keys, values, out, lse)
        if layer.sinks is not None:  # in a cascade as one more key of the prefix
            assert lse is not None
            add_sinks(out, lse, layer.sinks)
        if cascades:
            assert self.tree is not None and lse is not None
            prefix, out = (out, lse), torch.empty_like(out)
            tree_block_attention(q, keys, values, self.tree.slots, self.tree.mask, layer.scale, prefix, out)
        return out


def _paged_rows(batch: AttentionBatch, sliding: int) -> PagedRows:
    """The rows of a forward in layers with this sliding window, 0: none. In a tree it is measured by depth."""
    requests, mask = (batch.req_pool_indices, batch.kv_lens, batch.req_to_token), batch.mask
    if not isinstance(mask, TreeMask):
        return PagedRows(*requests, None, sliding)
    visible = mask.visible
    if sliding:
        visible = visible & (mask.column_depths[:, None] > mask.row_depths[..., None] - sliding)
    return PagedRows(*requests, visible, sliding, mask.row_depths)


def _both(trees: Hashable | None, chunks: Hashable | None) -> Hashable | None:
    """The graph key of a mixed forward, of those of its parts."""
    return None if trees is None or chunks is None else (trees, chunks)


def _plan_inputs(scratch: Scratch, layout: Layout, modes: Sequence[Mode]) -> list[tuple[Lengths, Tensor]]:
    """The arguments of plan for each mode: the lengths, and the buffer for the slots."""
    inputs_of: dict[Mode, tuple[Lengths, Tensor]] = {}
    for mode in modes:
        if mode not in inputs_of:
            inputs_of[mode] = (
                _lengths(layout, mode),
                scratch.slots(mode, len(layout.q_lens), layout.q_len or 0),
            )
    return [inputs_of[mode] for mode in modes]


def _lengths(layout: Layout, mode: Mode) -> Lengths:
    if mode == "cascade":
        assert layout.mask_width is not None
        return Lengths.of(layout.q_lens, [n - layout.mask_width for n in layout.kv_lens])
    if mode == "per_node":
        assert layout.mask_width is not None and layout.num_visible is not None and layout.q_len is not None
        hidden = layout.mask_width - layout.num_visible
        kv_lens = [n - hidden for n in layout.kv_lens for _ in range(layout.q_len)]
        return Lengths.of([1] * len(kv_lens), kv_lens)
    return Lengths.of(layout.q_lens, layout.kv_lens)
