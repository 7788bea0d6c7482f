"""Cached KV equals the KV of a plain causal pass over the same tokens, in the target pool and in the draft pool.

Wrong target KV changes texts, which other tests find. Wrong draft KV only lowers the acceptance, so these tests compare
the KV itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eagle_server.cache.node import Node
from eagle_server.cache.pool import Pool
from eagle_server.cache.radix import RadixCache
from eagle_server.engine.engine import Engine
from eagle_server.worker.verifier import Verifier
from tests.lossless.conftest import eagle_is_deep
from tests.lossless.pairs import Pair
from tests.support.dense import Recording, extend, features_of
from tests.support.engines import admit_without_reserve, pools, request, run, speculative

pytestmark = eagle_is_deep

TOLERANCE = 1e-4


def cached_texts(radix: RadixCache) -> Iterator[tuple[list[int], list[int]]]:
    """Every path to a leaf, as (tokens, pages). The tokens include the one after the last slot."""

    def descend(node: Node, keys: list[int], pages: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        keys, pages = keys + node.keys.tolist(), pages + node.pages
        if not node.children:
            yield [keys[0] >> 32, *(key & 0xFFFFFFFF for key in keys)], pages
        for child in node.children.values():
            yield from descend(child, keys, pages)

    for node in radix.root.children.values():
        yield from descend(node, [], [])


def worst_cached_slot(pair: Pair, engine: Engine) -> tuple[float, float, int]:
    """(largest error of target KV, of draft KV, number of compared slots). An error is NaN if a slot is poisoned.

    What the drafter has not read yet has features that wait instead of draft KV.
    """
    radix = engine.scheduler.kv.radix
    assert radix is not None
    target_pool, draft_pool = pools(engine)
    assert draft_pool is not None
    target_error = draft_error = torch.zeros(())
    slots_seen = 0
    for tokens, pages in cached_texts(radix):
        slots = (torch.tensor(pages)[:, None] * radix.page_size + torch.arange(radix.page_size)).view(-1)
        target, draft = Recording(), Recording()
        features = features_of(pair.target, tokens[:-1], pair.head.aux_boundaries, target)
        extend(pair.head, features, tokens, draft)
        target_error = torch.maximum(target_error, difference(target_pool, slots, target))
        waiting = waiting_features(engine, slots)
        is_read = torch.tensor([number not in waiting for number in range(len(slots))])
        draft_error = torch.maximum(draft_error, difference(draft_pool, slots, draft, is_read))
        for number, feature in waiting.items():
            draft_error = torch.maximum(draft_error, (feature - features[number]).abs().max())
        slots_seen += len(slots)
    return float(target_error), float(draft_error), slots_seen


def waiting_features(engine: Engine, slots: Tensor) -> dict[int, Tensor]:
    """The features of slots whose draft KV is not written yet, by their places among `slots`."""
    unread = engine.worker.batches.unread
    found = zip(unread._forward[slots].tolist(), unread._row[slots].tolist(), strict=True)
    return {place: unread._features[forward][row] for place, (forward, row) in enumerate(found) if forward >= 0}


def difference(pool: Pool, slots: Tensor, dense: Recording, chosen: Tensor | None = None) -> Tensor:
    """The largest error of slots; of the chosen ones, bool [slots]."""
    layers = [*zip(pool.keys, dense.keys, strict=True), *zip(pool.values, dense.values, strict=True)]
    wrong = torch.stack([(stored[slots] - expected).abs().flatten(1).amax(dim=1) for stored, expected in layers])
    return (wrong if chosen is None else wrong[:, chosen]).max() if chosen is None or chosen.any() else torch.zeros(())


def busy_engine(pair: Pair, page: int, topk: int) -> Engine:
    """An engine after chunked prefills, joining requests, preemptions, resumptions, prefix hits, aborts, evictions."""
    generator = torch.Generator().manual_seed(page)
    texts = torch.randint(0, 62, (14, 60), generator=generator).tolist()
    lengths = torch.randint(8, 60, (14,), generator=generator).tolist()
    requests = [
        request(i, (texts[i % 3][:30] + texts[i])[:length], seed=i, temperature=(0.0, 0.9)[i % 2], max_tokens=20)
        for i, length in enumerate(lengths)
    ]
    engine = speculative(pair.target, pair.head, 3, topk, page_size=page, chunked_prefill_size=24, max_total_tokens=224)
    admit_without_reserve(engine.scheduler)

    def abort(cycle: int) -> None:
        if cycle in (5, 14, 23):
            engine.abort(engine.scheduler.running[-1].request.request_id)

    outcome = run(engine, requests[:7], joining={4: requests[7:10], 12: requests[10:]}, each_cycle=abort)
    assert engine.stats().preemptions > 0
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
    assert sum(finished.cached_tokens for finished in outcome.values()) > 0
    return engine


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("page", [1, 16])
def test_every_cached_slot_holds_the_kv_of_its_tokens(pair: Pair, page: int, topk: int) -> None:
    target_error, draft_error, slots = worst_cached_slot(pair, busy_engine(pair, page, topk))
    assert slots > 100
    assert target_error < TOLERANCE
    assert draft_error < TOLERANCE


@pytest.mark.parametrize("page", [1, 16])
def test_prompts_answered_by_one_token_leave_right_kv(pair: Pair, page: int) -> None:
    engine = speculative(pair.target, pair.head, 3, 4, page_size=page, chunked_prefill_size=24)
    texts = torch.randint(0, 62, (3, 70), generator=torch.Generator().manual_seed(page)).tolist()
    for text in texts:
        run(engine, [request("first", text, max_tokens=1)])
        (again,) = run(engine, [request("again", text, max_tokens=1)]).values()
        assert again.cached_tokens == (len(text) - 1) // page * page
    assert not engine.worker.batches.unread.is_empty
    target_error, draft_error, slots = worst_cached_slot(pair, engine)
    assert slots == sum((len(text) - 1) // page * page for text in texts)
    assert target_error < TOLERANCE
    assert draft_error < TOLERANCE
    for text in texts:  # their drafts read what the prompts before have left
        run(engine, [request("longer", text, max_tokens=3)])
    assert engine.worker.batches.unread.is_empty
    target_error, draft_error, _ = worst_cached_slot(pair, engine)
    assert target_error < TOLERANCE
    assert draft_error < TOLERANCE


def test_a_tree_that_is_not_compacted_is_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "keep", lambda *_: None)
    target_error, _, _ = worst_cached_slot(pair, busy_engine(pair, 1, 4))
    assert not target_error < 100 * TOLERANCE
