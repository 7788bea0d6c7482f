"""Warm-up cycles on the padding row, before the first request: they compile kernels and capture CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from eagle_server.attention.batches import CAPTURED_PIECES, PIECE_ROWS
from eagle_server.ops.device import has_streams, mirrors
from eagle_server.plan import Chunk, CyclePlan, Decode, RequestSampling, TreeShape
from eagle_server.request import SamplingParams
from eagle_server.speculation.tree_config import fitting
from eagle_server.worker.budget.cost_model import CostModel, StageTimes
from eagle_server.worker.worker import Worker

_PROMPT = 128  # tokens: enough for the kernels of long prompts
_GREEDY = RequestSampling(SamplingParams(max_tokens=1, seed=0, temperature=0.0), key=0)
_SAMPLED = RequestSampling(SamplingParams(max_tokens=1, seed=0), key=1)
_MEASURING = 1.0  # seconds, about
_REPEATS = 3
_LONG = 512  # tokens of the longer texts
_LEAST_PER_KV = 2e-5  # seconds per KV token, as a part of those of one row
_NOTHING = TreeShape(0, 1)  # to draft
_REPEATING = (0, 1, 0, 2, 0)  # a text that n-grams continue by a tree that branches
_TRUNCATED = RequestSampling(SamplingParams(max_tokens=1, seed=0, top_k=50, top_p=0.9), key=1)
# Edited logits are float32, whatever the target's are: they have kernels of their own.
_EDITED = RequestSampling(SamplingParams(max_tokens=1, seed=0, top_k=50, top_p=0.9, logit_bias=((0, 1.0),)), key=1)


def warm_up(worker: Worker, shape: TreeShape, sizes: Iterable[int], lengths: Sequence[int] = (2,)) -> None:
    """Run prompts, and decode batches of these sizes and sequence lengths, with trees of this shape.

    The prompts are a long one, one of one token, both at once where two requests may run, and with graphs one of few
    pieces. The batches come after cycles that accepted few tokens and many.
    """
    row = worker.batches.pad_row
    width = worker.batches.table.tensor.shape[1]
    lens = min(_PROMPT, width), min(PIECE_ROWS, width), 1
    long, middle, short = (Chunk(row, 0, (0,) * n, next_token=None, sampling=_GREEDY) for n in lens)
    prompts = (*([(middle,)] if worker.batches.sizes else []), (long,), (short,), (short, long))
    for chunks in prompts[:-1] if row < 2 else prompts:  # noqa: PLR2004  rows below the padding row are requests
        worker.run(CyclePlan(chunks=chunks, warm_up=shape))
    shortest, *longer = lengths
    # In the second cycle the first one's requests have accepted as many tokens as they can: the widest draft-extend.
    more = worker.batches.accepted_tokens.width if shape.steps else 0
    both = ((shortest, _GREEDY, (row,)), (shortest + more, _SAMPLED, () if more else (row,)))
    cut = ((shortest, sampling, (row,)) for sampling in (_TRUNCATED, _EDITED))
    cycles = (*both, *((length, _GREEDY, (row,)) for length in longer), *cut)
    for size in sizes:
        for length, sampling, released in cycles:
            decodes = (Decode(row, length, verified_id=0, sampling=sampling, all_tokens=_REPEATING),) * size
            worker.run(CyclePlan(decodes=decodes, released=released, warm_up=shape))
    worker.run(CyclePlan(released=(row,), warm_up=shape))
    if has_streams(worker.batches.device):
        torch.cuda.synchronize()


def warm_up_mixed(worker: Worker, shape: TreeShape, size: int, length: int, pieces: int) -> None:
    """Run `size` decodes of this length, with trees of this shape, and a prompt in one forward, for its graph.

    pieces: of the forward, one of CAPTURED_PIECES. The prompt is the shortest that needs so many.
    """
    row = worker.batches.pad_row
    rows = 1 + PIECE_ROWS * max((count for count in CAPTURED_PIECES if count < pieces), default=0)
    prompt = Chunk(row, 0, (0,) * rows, next_token=None, sampling=_GREEDY)
    decodes = (Decode(row, length, verified_id=0, sampling=_GREEDY),) * size
    worker.run(CyclePlan((prompt,), decodes, released=(row,), warm_up=shape))
    worker.run(CyclePlan(released=(row,), warm_up=shape))


def measure_costs(
    worker: Worker, costs: CostModel, shapes: Mapping[int, Sequence[TreeShape]], most: int, longest: int
) -> None:
    """Fit `costs` to plain cycles and to cycles of trees, in about a second.

    `shapes`: of the trees, by batch size; beyond the last size as there. Batches have up to `most` requests. Texts are
    short, but in one batch they have up to `longest` tokens.
    """
    measured = _Measured(worker)
    measured.plain(1)  # the first cycles of a process are slow
    began = time.perf_counter()
    for size in dict.fromkeys(min(wanted, most) for wanted in (1, 8, most, 4, 16, 2, 32)):
        measured.plain(size)
        for shape in fitting(shapes, size):
            measured.drafting(size, shape)
        if time.perf_counter() - began > _MEASURING:
            break
    several, length = min(8, most), min(longest, _LONG)
    shape = fitting(shapes, several)[0]
    with _own_slots(worker, several, length) as rows:
        more = measured.plain(several, length, rows) - measured.plain(several)
        wider = measured.tree(several, shape, length, rows).verify - measured.tree(several, shape).verify
    slope = max(more / (several * length), _LEAST_PER_KV * measured.verify[1])
    if measured.rows > several:  # tries of the padding row are empty
        nodes = measured.rows / several
        costs.kv_per_node = min(max((wider / (slope * several * length) - 1) / (nodes - 1), 0.0), 1.0)
    worker.run(CyclePlan(released=(worker.batches.pad_row,), warm_up=_NOTHING))
    costs.between = measured.other[several]
    costs.verify.fit(measured.verify, slope)
    costs.extend.fit(measured.extend)
    costs.step.fit(measured.step)


@contextmanager
def _own_slots(worker: Worker, requests: int, length: int) -> Iterator[Sequence[int]]:
    """Rows of the page table whose slots differ, as those of real requests do: reading one slot again costs nothing.

    Before the first request all slots are free. Only on a CPU is the page table the host's own.
    """
    batches = worker.batches
    if mirrors(batches.device):
        yield (batches.pad_row,) * requests
        return
    table, pool = batches.table.tensor, worker.verifier.pool
    rows = range(min(requests, batches.pad_row))
    places = torch.arange(len(rows) * (length + 1)) % (len(pool.keys[0]) - 1) + 1
    # Written as it is, zeros or poison, because memory that nobody wrote is not really read.
    (pool.poison if pool.keys[0][1:2].isnan().any() else pool.clear)(places.unique())
    table[: len(rows), : length + 1] = places.view(len(rows), -1)
    try:
        yield tuple(rows)
    finally:
        table[: len(rows)] = 0


class _Measured:
    """Seconds of a cycle's stages, by their size."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._row = worker, worker.batches.pad_row
        self.rows = 0  # of the last cycle's verify forward
        self.verify: dict[int, float] = {}
        self.other: dict[int, float] = {}  # by requests
        self.extend: dict[int, float] = {}
        self.step: dict[int, float] = {}

    def plain(self, size: int, length: int = 2, rows: Sequence[int] = ()) -> float:
        """Cycles in which nothing is drafted. `rows`: of the page table, for the requests; (): the padding row."""
        times = StageTimes.of(self._run(size, length, _NOTHING, rows), 0)
        if length == 2:  # noqa: PLR2004  the shortest text
            self.verify[size], self.other[size] = times.verify, times.other
        return times.verify

    def drafting(self, size: int, shape: TreeShape) -> None:
        """Cycles in which all requests draft."""
        times = self.tree(size, shape)
        self.verify.setdefault(self.rows, times.verify)  # tries of the padding row are empty
        batches = self._worker.batches
        width = batches.accepted_tokens.extend_width(1) if batches.sizes else 1  # here each has accepted one token
        more = max(0.0, times.other - self.other[size])
        self.extend.setdefault(size * width, times.extend + more)
        if times.step is not None:
            self.step[size * self._worker.drafter.forwards(shape)[1]] = times.step

    def tree(self, size: int, shape: TreeShape, length: int = 2, rows: Sequence[int] = ()) -> StageTimes:
        """The stages of cycles in which all requests draft. `rows`: see `plain`."""
        return StageTimes.of(self._run(size, length, shape, rows), self._worker.drafter.forwards(shape)[0])

    def _run(self, size: int, length: int, shape: TreeShape, rows: Sequence[int] = ()) -> dict[str, float]:
        rows = rows or (self._row,) * size
        decodes = tuple(Decode(row, length, verified_id=0, sampling=_GREEDY) for row in rows)
        plan = CyclePlan(decodes=decodes, released=tuple(dict.fromkeys(rows)), warm_up=shape)
        self.rows = self._worker.run(plan).rows  # compiles
        runs = [self._worker.run(plan).stage_seconds for _ in range(_REPEATS)]
        # the fastest, because other processes may disturb some
        return {stage: min(run[stage] for run in runs) for stage in runs[0]}
