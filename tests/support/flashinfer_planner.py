"""The plans of FlashInfer's paged prefill (fa2), and what its kernels compute by them.

The planner is `PrefillPlanImpl` in flashinfer/attention/scheduler.cuh of 0.7.2.post1, for page size 1. A test compares
its arrays with those of the installed planner. The kernels read the plan in the int workspace alone, and lengths in
the wrapper's buffers: a plan for other lengths gives other results, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tests.support.flashinfer_log import attend

SMALLEST_CHUNK = 128
NO_SPLIT = (1 << 63) - 1


@dataclass(frozen=True)
class Planned:
    """The planner's arguments besides lengths. `window` -1: none. `uniform`: rows of each request; 0: not given."""

    heads: int
    kv_heads: int
    dim: int
    sms: int
    graph: bool
    window: int = -1
    disable_split_kv: bool = False
    uniform: int = 0

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def most_blocks(self) -> int:
        return 2 * self.sms // self.kv_heads


@dataclass(frozen=True)
class Split:
    """How a batch is cut into blocks: one entry per block, then prefix sums of partial results."""

    request_indices: list[int]
    qo_tile_indices: list[int]
    kv_tile_indices: list[int]
    o_indptr: list[int]
    merge_indptr: list[int]
    kv_chunk_size: int
    tile: int
    padded: int
    splits: bool


def tile_of(packed: int, dim: int) -> int:
    """Packed rows per block (FA2DetermineCtaTileQ), on Ampere or newer."""
    if dim >= 512:
        return 16 if packed <= 32 else 32
    if packed > 64 and dim < 256:
        return 128
    return 64 if packed > 16 else 16


def split(q_lens: Sequence[int], kv_lens: Sequence[int], given: Planned, total_rows: int) -> Split:
    """`PrefillSplitQOKVIndptr`."""
    group, count = given.group, len(q_lens)
    packed = [rows * group for rows in q_lens]
    if not given.graph:
        tile = tile_of(sum(packed) // count, given.dim)
        bound = sum(-(-each // tile) for each in packed)
    elif given.uniform:
        assert set(q_lens) == {given.uniform}
        tile = tile_of(packed[0], given.dim)
        bound = count * -(-packed[0] // tile)
    else:
        tile = tile_of((total_rows - count + 1) * group, given.dim)
        bound = -(-total_rows * group // tile) + count - 1
    seen = [max(1, min(n, given.window + tile) if given.window >= 0 else n) for n in kv_lens]
    tiles = [-(-each // tile) for each in packed]
    chunk, splits = NO_SPLIT, False
    if not given.disable_split_kv:
        chunk = _chunk(tiles, seen, given.most_blocks)
        splits = given.graph or chunk < max(seen)
    chunks = [-(-n // chunk) for n in seen]
    blocks = [
        (request, tile_idx, kv_tile)
        for request in range(count)
        for tile_idx in range(tiles[request])
        for kv_tile in range(chunks[request])
    ]
    merged = [n for rows, n in zip(q_lens, chunks, strict=True) for _ in range(rows)]
    padded = max(given.most_blocks, bound) if given.graph else len(blocks)
    assert len(blocks) <= padded
    columns = [list(column) for column in zip(*blocks, strict=True)]
    o_indptr = [0, *accumulate(rows * n for rows, n in zip(q_lens, chunks, strict=True))]
    return Split(*columns, o_indptr, [0, *accumulate(merged)], chunk, tile, padded, splits)


def _chunk(tiles: Sequence[int], seen: Sequence[int], most_blocks: int) -> int:
    low, high = SMALLEST_CHUNK, max(seen)
    while low < high:
        middle = (low + high) // 2
        if sum(t * -(-n // middle) for t, n in zip(tiles, seen, strict=True)) > most_blocks:
            low = middle + 1
        else:
            high = middle
    return low


def write_plan(ints: Tensor | None, qo_indptr: Tensor, kv_lens: Tensor, given: Planned, total_rows: int) -> list[int]:
    """Write the plan to the int workspace uint8; None: none. Returns `PrefillPlanInfo`, and the bytes it takes last."""
    q_lens = qo_indptr.diff().tolist()
    found = split(q_lens, kv_lens.tolist(), given, total_rows)
    taken = 0

    def place(values: Sequence[int], count: int, dtype: torch.dtype = torch.int32, alignment: int = 16) -> int:
        nonlocal taken
        start = -(-taken // alignment) * alignment
        taken = start + count * dtype.itemsize
        if ints is not None:
            if taken > len(ints):
                raise RuntimeError(f"Buffer overflow when allocating memory: {taken} bytes are needed")
            ints[start:taken].view(dtype)[: len(values)] = torch.tensor(values).to(dtype)
        return start

    blocks = len(found.request_indices)
    requests, qo_tiles, kv_tiles = (
        place(values, found.padded) for values in (found.request_indices, found.qo_tile_indices, found.kv_tile_indices)
    )
    o_indptr = place(found.o_indptr, len(found.o_indptr))
    chunk = place([found.kv_chunk_size], 1, alignment=1)
    rows = place([sum(q_lens)], 1) if given.graph else 0
    merge = place(found.merge_indptr, total_rows + 1) if found.splits else 0
    valid = 0
    if given.graph:
        valid = place([i < blocks for i in range(found.padded)], found.padded, torch.uint8)
    offsets = [requests, qo_tiles, kv_tiles, merge, o_indptr, chunk, 0, 0, valid]
    return [found.padded, total_rows, rows, found.tile, *offsets, int(given.graph), int(found.splits), taken]


@dataclass(frozen=True)
class Paged:
    """The tensors of a run: one cache row per slot [slots, kv_heads, *], and the wrapper's buffers."""

    keys: Tensor
    values: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor


def run_plan(
    ints: Tensor,
    info: Sequence[int],
    q: Tensor,
    paged: Paged,
    visible: Callable[[int, int, int], Tensor],
    window_left: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What the kernels of a plan write: out float64 [rows, heads, value_dim] and the base-2 LSE [rows, heads].

    visible: of a request, its rows and its KV length, bool [rows, kv_len], without the window.
    """
    padded, most_rows, rows_at, tile, *_ = info
    requests, qo_tiles, kv_tiles, merge_at, o_at, chunk_at, _, _, valid_at, graph, splits = info[4:15]
    heads, group = q.shape[1], q.shape[1] // paged.keys.shape[1]
    count = len(paged.qo_indptr) - 1

    def words(start: int, size: int) -> list[int]:
        found: list[int] = ints[start : start + 4 * size].view(torch.int32).tolist()
        return found

    blocks = zip(words(requests, padded), words(qo_tiles, padded), words(kv_tiles, padded), strict=True)
    valid = ints[valid_at : valid_at + padded].tolist() if graph else [1] * padded
    o_indptr, chunk = words(o_at, count + 1), words(chunk_at, 1)[0] % (1 << 32)
    q_ends, kv_ends, last = (t.tolist() for t in (paged.qo_indptr, paged.kv_indptr, paged.last_page_len))
    written: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for (request, qo_tile, kv_tile), is_valid in zip(blocks, valid, strict=True):
        if not is_valid:
            continue
        q_len, pages = q_ends[request + 1] - q_ends[request], kv_ends[request + 1] - kv_ends[request]
        kv_len = max(pages - 1, 0) + last[request]
        window = window_left if window_left >= 0 else kv_len
        start = max(0, kv_len + qo_tile * tile // group - q_len - window)
        first, end = (min((kv_tile + i) * chunk + start, kv_len) if splits else (start, kv_len)[i] for i in (0, 1))
        rows = torch.arange(qo_tile * tile // group, min(q_len, -(-(qo_tile + 1) * tile // group)))
        slots = paged.kv_indices[kv_ends[request] + first : kv_ends[request] + end].long()
        columns = torch.arange(first, end)
        seen = visible(request, q_len, kv_len)[rows, first:end]
        seen = seen & (columns + q_len + window >= kv_len + rows[:, None])
        mine = q[q_ends[request] + rows]
        out, lse = attend(mine, paged.keys[slots], paged.values[slots], seen, scale)
        packed = rows[:, None] * group + torch.arange(heads) % group
        stride = -(-min(max(kv_len, 1), window + tile) // chunk) if splits else 1
        places = o_indptr[request] + rows * stride + (kv_tile if splits else 0)
        written.append((places, out, lse, (packed >= qo_tile * tile) & (packed < (qo_tile + 1) * tile)))
    total = words(rows_at, 1)[0] if graph else most_rows
    merged = words(merge_at, total + 1) if splits else list(range(len(q) + 1))
    size = max(int(places.max()) + 1 for places, *_ in written)
    partial = q.new_full((max(size, merged[-1]), heads, paged.values.shape[2]), torch.nan, dtype=torch.float64)
    partial_lse = partial[..., 0].clone()
    for places, out, lse, computed in written:
        partial[places] = torch.where(computed[..., None], out, partial[places])
        partial_lse[places] = torch.where(computed, lse, partial_lse[places])
    if merged == list(range(len(q) + 1)):
        return partial[: len(q)], partial_lse[: len(q)]
    out, lse = (
        partial.new_full((len(q), *partial.shape[1:]), torch.nan),
        partial_lse.new_full((len(q), heads), torch.nan),
    )
    for row, (begin, end) in enumerate(pairwise(merged)):
        lse[row] = partial_lse[begin:end].mul(_LN2).logsumexp(0) / _LN2
        weights = torch.where(lse[row] == -torch.inf, 0.0, (partial_lse[begin:end] - lse[row]).exp2())
        out[row] = (weights[..., None] * partial[begin:end]).sum(0)
    return out, lse


_LN2 = 0.6931471805599453
