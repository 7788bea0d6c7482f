"""The torch_native backend against dense attention in float64, with NaN in every slot that must not be read."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from eagle_server.attention.batches import (
    cache_locations,
    draft_decode_layout,
    draft_step_batch,
    prefill_batch,
    verify_batch,
    verify_layout,
    window_layout,
)
from eagle_server.attention.interface import AttentionBatch, Causal, LayerSpec, Layout, PagedRequests
from eagle_server.attention.spec_info import DraftWindow, EagleDraftInput, EagleVerifyInput
from eagle_server.attention.torch_native import SHORT_QUERY, torch_native
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.pool import KVPool, KVShape
from eagle_server.speculation.tree import Tree, compacted
from tests.support.trees import tree_of

DIM, LAYERS, WIDTH = 8, 2, 192
CPU = torch.device("cpu")
TOLERANCE = 1e-5
WINDOWS = (0, 3, 11)


@dataclass
class Paged:
    """Requests with their KV in shuffled pages, and the same KV by position in plain lists."""

    heads: int
    kv_heads: int
    page: int
    kv_lens: list[int]
    seed: int = 0
    layer: int = 1
    dtype: torch.dtype = torch.float32
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.table = PageTable(len(self.kv_lens), WIDTH, self.page)
        pages = [-(-length // self.page) for length in self.kv_lens]
        order = (torch.randperm(sum(pages), generator=self.generator) + 1).tolist()
        slots = (sum(pages) + 1) * self.page
        self.pool = KVPool([KVShape(self.kv_heads, DIM)] * LAYERS, slots, self.dtype, torch.device("cpu"))
        self.pool.poison(torch.arange(self.page, slots))
        self.table.slots[:] = 1  # after a request's pages: a slot of another request
        for row, (count, length) in enumerate(zip(pages, self.kv_lens, strict=True)):
            self.table.assign(row, 0, [order.pop() for _ in range(count)])
            self.keys.append(self.normal(length, self.kv_heads, DIM))
            self.values.append(self.normal(length, self.kv_heads, DIM))

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(self.dtype)

    @property
    def req_to_token(self) -> Tensor:
        return torch.from_numpy(self.table.slots)

    @property
    def req_pool_indices(self) -> Tensor:
        return torch.arange(len(self.kv_lens))

    def requests(self, seq_lens: Tensor) -> PagedRequests:
        return PagedRequests(self.req_pool_indices, seq_lens, self.req_to_token)

    def store(self, row: int, positions: Sequence[int]) -> None:
        """Write K and V of positions that earlier forwards would have written."""
        slots = self.req_to_token[row, list(positions)].long()
        self.pool.write(self.layer, slots, self.keys[row][list(positions)], self.values[row][list(positions)])

    def reference(self, row: int, query: Tensor, seen: Sequence[int], scale: float) -> Tensor:
        """One query [heads, DIM] over the positions `seen`, in float64."""
        out = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            keys, values = (x[row][list(seen), group].double() for x in (self.keys, self.values))
            weights = torch.softmax(keys @ query[head].double() * scale, dim=0)
            out.append(weights @ values)
        return torch.stack(out)


def attend(
    paged: Paged,
    batch: AttentionBatch,
    queries: Tensor,
    new: Sequence[Sequence[int]],
    window: int,
    softcap: float = 0.0,
) -> Tensor:
    """Run a layer. Its new K and V are those of the positions `new` of each request."""
    keys = torch.cat([paged.keys[row][list(p)] for row, p in enumerate(new)])
    values = torch.cat([paged.values[row][list(p)] for row, p in enumerate(new)])
    layer = LayerSpec(paged.layer, 0.37, window, softcap)
    return torch_native(paged.pool).plan(batch.layout).bind(batch).run(queries, keys, values, layer)


def causal_batch(paged: Paged, q_lens: Sequence[int], kv_lens: Sequence[int]) -> AttentionBatch:
    layout = Layout(tuple(q_lens), tuple(kv_lens))
    return prefill_batch(paged.req_pool_indices, torch.tensor(kv_lens), paged.req_to_token, Causal(), layout)


def error(found: Tensor, expected: list[Tensor]) -> float:
    assert not bool(found.isnan().any()), "an unwritten slot was read"
    return float((found.double() - torch.stack(expected)).abs().max())


CASES = {
    "decode of one": ([1], [17]),
    "decodes of equal lengths": ([1, 1, 1], [9, 9, 9]),
    "decodes of unequal lengths": ([1, 1, 1, 1], [1, 40, 16, 17]),
    "short and unequal": ([3, 1, 7, 2], [3, 30, 7, 33]),
    "one long prompt": ([70], [70]),
    "a long chunk behind a prefix": ([50], [90]),
    "long and short mixed": ([1, 60, 4, 45, 1], [23, 60, 4, 77, 1]),
    "at the border of short": ([SHORT_QUERY, SHORT_QUERY + 1, 1], [SHORT_QUERY, 64, 5]),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("case", CASES)
def test_causal_attention_over_ragged_paged_batches(
    case: str, heads: int, kv_heads: int, page: int, window: int
) -> None:
    q_lens, kv_lens = CASES[case]
    paged = Paged(heads, kv_heads, page, kv_lens)
    new = [range(n - q, n) for q, n in zip(q_lens, kv_lens, strict=True)]
    for row, positions in enumerate(new):
        paged.store(row, range(positions.start))
    batch = causal_batch(paged, q_lens, kv_lens)
    queries = paged.normal(sum(q_lens), heads, DIM)
    found = attend(paged, batch, queries, new, window)
    places = [(row, p) for row, positions in enumerate(new) for p in positions]
    expected = [
        paged.reference(row, query, range(max(0, p + 1 - window) if window else 0, p + 1), 0.37)
        for (row, p), query in zip(places, queries, strict=True)
    ]
    assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("prefixes", [[12], [20, 20, 20], [0, 5, 37, 16]])
def test_tree_attention_sees_prefix_and_ancestors_and_measures_windows_by_depth(
    prefixes: list[int], page: int, window: int
) -> None:
    size, rng = 9, random.Random(len(prefixes))
    paged = Paged(4, 2, page, [n + size for n in prefixes])
    parents = [[-1, *(rng.randrange(node) for node in range(1, size))] for _ in prefixes]
    for row, length in enumerate(prefixes):
        paged.store(row, range(length))
    layout = verify_layout(tuple(prefixes), size, topk=2)
    lens = torch.tensor(prefixes)
    tree = tree_of(parents, [[5] * size] * len(prefixes), prefixes, size)
    batch = verify_batch(EagleVerifyInput(tree), paged.requests(lens), layout)
    queries = paged.normal(size * len(prefixes), 4, DIM)
    found = attend(paged, batch, queries, [range(n, n + size) for n in prefixes], window)
    expected = []
    for row, length in enumerate(prefixes):
        for node in range(size):
            path = [node]
            while parents[row][path[0]] >= 0:
                path.insert(0, parents[row][path[0]])
            oldest = length + len(path) - window if window else 0
            seen = [p for p in range(length) if p >= oldest]
            seen += [length + each for depth, each in enumerate(path) if length + depth >= oldest]
            expected.append(paged.reference(row, queries[row * size + node], seen, 0.37))
    assert error(found, expected) < TOLERANCE


PREFIXES = [20, 3, 37, 16, 20]
COUNTS = {
    "of all sizes": [9, 1, 4, 9, 2],
    "all smaller": [3, 5, 1, 1, 2],
    "equal": [4, 4, 4, 4, 4],
    "roots only": [1, 1, 1, 1, 1],
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("softcap", [0.0, 0.8])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("kept", COUNTS)
def test_rows_of_compacted_trees_equal_those_of_the_padded_trees(
    kept: str, topk: int, heads: int, kv_heads: int, window: int, softcap: float, dtype: torch.dtype, tolerance: float
) -> None:
    """The KV of dropped nodes is NaN when the compacted trees run."""
    size, counts, rng = 9, COUNTS[kept], random.Random(heads)
    lens, bs = torch.tensor(PREFIXES), len(PREFIXES)
    parents = [[-1, *(node - 1 if topk == 1 else rng.randrange(node) for node in range(1, size))] for _ in range(bs)]
    tokens = torch.where(torch.arange(size) < torch.tensor(counts)[:, None], 5, -1)
    padded = Tree.linked(tokens, torch.tensor(parents), lens, size, topk)
    tree = compacted(padded)
    found = []
    for each, rows in ((padded, [size] * bs), (tree, counts)):
        paged = Paged(heads, kv_heads, 4, [n + size for n in PREFIXES], dtype=dtype)
        for row, length in enumerate(PREFIXES):
            paged.store(row, range(length))
        queries = paged.normal(bs, size, heads, DIM)
        chosen = torch.cat([queries[row, :count] for row, count in enumerate(rows)])
        given = None if each.counts is None else rows
        layout = verify_layout(PREFIXES, each.size, each.topk, given)
        assert sum(layout.q_lens) == sum(rows)
        batch = verify_batch(EagleVerifyInput(each), paged.requests(lens), layout)
        new = [range(n, n + count) for n, count in zip(PREFIXES, rows, strict=True)]
        found.append(attend(paged, batch, chosen, new, window, softcap))
    computed = (tokens.view(-1) >= 0).nonzero()[:, 0]
    assert error(found[1], list(found[0][computed].double())) < tolerance


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("prefixes", [[9, 9], [4, 30, 17]])
def test_a_draft_step_as_masked_pass_and_as_explicit_decodes_is_the_same(prefixes: list[int], window: int) -> None:
    """Each node also reads its ancestors. Earlier steps wrote the levels above, and the branches have different KV."""
    bs, topk, steps = len(prefixes), 3, 3
    generator = torch.Generator().manual_seed(7)
    paged = Paged(4, 2, 4, [n + topk * steps for n in prefixes])
    lens = torch.tensor(prefixes)
    start = torch.zeros(bs, topk), torch.zeros(bs, topk, dtype=torch.int64)
    draft = EagleDraftInput.first(*start, torch.zeros(bs * topk, 1), DraftWindow.of(topk, steps * topk, CPU))
    moved = 0
    for row, length in enumerate(prefixes):
        paged.store(row, range(length))
    for step in range(steps):
        queries = paged.normal(bs * topk, 4, DIM)
        new = [range(n + step * topk, n + (step + 1) * topk) for n in prefixes]
        alone = draft_decode_layout(tuple(prefixes), step, topk)
        assert alone.num_visible == step + 1
        ends = draft.cut((step + 1) * topk)
        slots = cache_locations(paged.req_pool_indices, lens + step * topk, topk, paged.req_to_token)
        batch = draft_step_batch(ends, slots, paged.requests(lens), alone)
        masked = attend(paged, batch, queries, new, window)
        paged.pool.clear(torch.cat([paged.req_to_token[r, p.stop :].long() for r, p in enumerate(new)]))
        together = window_layout(tuple(prefixes), topk, steps * topk)
        batch = draft_step_batch(draft, slots, paged.requests(lens), together)
        assert float((attend(paged, batch, queries, new, window) - masked).abs().max()) < TOLERANCE
        kv_indices, kv_indptr, qo_indptr = draft.generate_attn_arg_decode(
            paged.req_pool_indices, lens, paged.req_to_token
        )
        kv_lens = tuple(n + step + 1 for n in prefixes for _ in range(topk))
        assert kv_indptr.tolist() == [0, *accumulate(kv_lens)]
        assert qo_indptr.tolist() == list(range(bs * topk + 1))
        table = torch.nn.utils.rnn.pad_sequence(kv_indices.split(list(kv_lens)), batch_first=True)  # a row per query
        queries_rows = torch.arange(bs * topk)
        explicit = prefill_batch(
            queries_rows, torch.tensor(kv_lens), table, Causal(), Layout((1,) * len(kv_lens), kv_lens)
        )
        decoded = attend(paged, explicit, queries, new, window)
        assert float((decoded - masked).abs().max()) < TOLERANCE
        if step == steps - 1:
            break
        scores = torch.randn(bs, topk, topk, generator=generator)
        draft, chosen = draft.advance(torch.zeros_like(scores).long(), scores, torch.zeros(bs * topk, 1))
        moved += int((chosen // topk != torch.arange(topk)).sum())
    assert moved > 0


def test_a_draft_step_reads_the_slots_of_the_worked_example() -> None:
    """cycle.md, section 5: node 21 reads prefix, 4, 6 and node 22 reads prefix, 4, 7."""
    ancestor_mask = torch.tensor([[[True, False, True, False], [True, False, False, True]]])
    draft = EagleDraftInput(
        1, torch.tensor([[21, 22]]), torch.zeros(1, 2), torch.zeros(2, 1), ancestor_mask, DraftWindow.of(2, 4, CPU)
    )
    req_to_token = torch.arange(12, dtype=torch.int32)[None]
    kv_indices, kv_indptr, qo_indptr = draft.generate_attn_arg_decode(
        torch.tensor([0]), torch.tensor([4]), req_to_token
    )
    assert qo_indptr.tolist() == [0, 1, 2]
    assert kv_indptr.tolist() == [0, 6, 12]
    assert kv_indices.tolist() == [0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 7]


def test_layers_keep_their_own_kv_and_plans_are_reused() -> None:
    paged = Paged(2, 2, 1, [6])
    batch = causal_batch(paged, [6], [6])
    bound = torch_native(paged.pool).plan(batch.layout).bind(batch)
    keys, values = paged.normal(LAYERS, 6, 2, DIM), paged.normal(LAYERS, 6, 2, DIM)
    queries = paged.normal(6, 2, DIM)
    for layer in range(LAYERS):
        bound.run(queries, keys[layer], values[layer], LayerSpec(layer, 1 / math.sqrt(DIM)))
    slots = paged.req_to_token[0, :6].long()
    assert torch.equal(paged.pool.groups[0][0][:, slots], keys)
    assert torch.equal(paged.pool.groups[0][1][:, slots], values)
