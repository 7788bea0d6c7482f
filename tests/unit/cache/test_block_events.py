"""Routers rebuild the cached blocks from events alone; their view is that of the tree after every step."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from eagle_server.cache.block_events import (
    AllBlocksCleared,
    BlockEvents,
    BlockRemoved,
    BlockStored,
    block_hash,
    block_size_of,
)
from eagle_server.cache.radix import RadixCache, bigrams
from tests.support.kv_events import MirroredBlocks, cached_prefixes
from tests.unit.cache.test_manager import AllocationsUnderRandomUse, manager


class EventsUnderRandomUse(AllocationsUnderRandomUse):
    """Pages enter by publishing and release, and leave by eviction, by failure and by a flush."""

    @initialize(sizes=st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (3, 3), (2, 6)]), pages=st.integers(4, 30))
    def start(self, sizes: tuple[int, int], pages: int) -> None:  # type: ignore[override]
        page_size, self.block_size = sizes
        self.start_with(manager(pages, page_size))
        assert self.kv.radix is not None
        self.kv.radix.events = BlockEvents(page_size, self.block_size)
        self.mirror = MirroredBlocks()

    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=12), salt=st.sampled_from([None, "a"]))
    def a_prompt_finds_what_the_events_tell_or_one_page_less(self, tokens: list[int], salt: str | None) -> None:
        found = len(self.kv.match(bigrams(tokens), salt).pages) * self.kv.page_size  # type: ignore[union-attr]
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        told = max((end for end in ends if (salt, tuple(tokens[:end])) in self.mirror.prefixes()), default=0)
        assert told - self.kv.page_size <= found
        assert found // self.block_size * self.block_size <= told

    @invariant()
    def the_mirror_agrees(self) -> None:
        assert self.kv.radix is not None
        self.mirror.apply(self.kv.take_events())
        assert self.mirror.prefixes() == cached_prefixes(self.kv.radix, self.block_size)


TestEventsUnderRandomUse = EventsUnderRandomUse.TestCase
TestEventsUnderRandomUse.settings = settings(max_examples=150, stateful_step_count=30)


@pytest.mark.parametrize(("page", "block"), [(1, 16), (3, 18), (5, 20), (16, 16), (24, 24), (64, 64)])
def test_a_block_is_whole_pages_and_at_least_16_tokens(page: int, block: int) -> None:
    assert block_size_of(page) == block


def recording(page_size: int = 1, block_size: int = 4) -> tuple[RadixCache, BlockEvents]:
    events = BlockEvents(page_size, block_size)
    assert events.take() == [AllBlocksCleared()], "a new process has nothing cached"
    return RadixCache(page_size, events), events


def test_events_have_the_fields_of_vllm() -> None:
    cache, events = recording()
    cache.insert(bigrams(range(10)), range(9), salt="a")
    cache.evict(5)
    stored, removed = [msgspec.msgpack.decode(msgspec.msgpack.encode(event)) for event in events.take()]
    first = block_hash(None, np.arange(4), "a")
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [first, block_hash(first, np.arange(4, 8))],
        "parent_block_hash": None,
        "token_ids": [*range(8)],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["a"], None],
    }
    assert removed == {"type": "BlockRemoved", "block_hashes": stored["block_hashes"][1:], "medium": "GPU"}


def test_a_flush_is_one_event() -> None:
    cache, events = recording()
    cache.insert(bigrams(range(10)), range(9))
    events.take()
    cache.insert(bigrams(range(5, 50)), range(44))
    cache.clear()
    assert events.take() == [AllBlocksCleared()]


def test_pages_with_the_same_tokens_and_different_next_tokens_are_one_block() -> None:
    cache, events = recording()
    for last in (8, 9):
        cache.insert(bigrams([1, 2, 3, 4, last]), [1, 2, 3, last])
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    cache.evict(1)
    assert events.take() == []
    cache.evict(1)
    assert events.take() == [BlockRemoved(stored.block_hashes, "GPU")]


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    assert block_hash(block_hash(None, np.arange(16), "é"), np.arange(16)) == 17218534558073773886


def test_hashes_tell_blocks_apart() -> None:
    tokens, other = np.arange(4), np.array([0, 1, 2, 2**31 - 1])
    hashes = {
        block_hash(parent, each, salt)
        for parent in (None, 7, 2**64 - 1)
        for each in (tokens, other)
        for salt in (None, "a", "b")
    }
    assert len(hashes) == 18
    assert all(0 <= each < 2**64 for each in hashes)
