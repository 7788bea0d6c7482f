"""Random requests over a KV that records what every slot was computed from: no wrong read, no lost page, every text."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.block_events import BlockEvents
from eagle_server.cache.manager import KVCacheManager
from eagle_server.cache.node import Node
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.radix import RadixCache
from eagle_server.plan import Chunk, CyclePlan, CycleResult, Decode, SequenceOutput
from eagle_server.request import FinishReason, Request
from eagle_server.scheduling.admission import SchedulerLimits
from eagle_server.scheduling.scheduler import Scheduler
from tests.support.engines import admit_without_reserve, request
from tests.support.kv_events import MirroredBlocks, cached_prefixes
from tests.support.sampling import request_sampling

GREEDY = request_sampling(temperature=0.0)
VOCAB, END, STEPS, WINDOW = 5, 0, 3, 6
GARBAGE = ("a node that was not kept",)


def next_token(tokens: Sequence[int]) -> int:
    """What the fake target says after a text. Most texts end with token 0 sooner or later."""
    return hash(tuple(tokens)) % 11 % VOCAB


@dataclass
class RecordingWorker:
    """Computes plans as the worker does. A slot of `target` holds the text up to its token; of `draft`, one further.

    A read of a slot that holds anything else fails, and so does a write to a cached page.
    """

    kv: KVCacheManager
    drafts: bool
    rng: random.Random
    target: dict[int, tuple[int, ...]] = field(default_factory=dict)
    draft: dict[int, tuple[int, ...]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)

    def forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            for slot in range(page * self.kv.page_size, (page + 1) * self.kv.page_size):
                self.target.pop(slot, None)
                self.draft.pop(slot, None)

    def run(self, plan: CyclePlan) -> CycleResult:
        for row in plan.released:
            self.starts.pop(row, None)
        self.cached = set(self.kv.radix.pages()) if self.kv.radix else set()
        decodes = [self.decode(each) for each in plan.decodes]
        return CycleResult(tuple(map(self.prefill, plan.chunks)), tuple(decodes))

    def prefill(self, chunk: Chunk) -> SequenceOutput:
        text, end = tuple(chunk.all_tokens), chunk.start + len(chunk.tokens)
        assert text[chunk.start : end] == chunk.tokens
        assert (chunk.next_token is None) == (end == len(text))
        self.read(self.target, chunk.req_pool_index, text, chunk.start, 1)
        self.write(self.target, chunk.req_pool_index, text, chunk.start, end, 1)
        paired = chunk.start + len(chunk.following)
        self.read(self.draft, chunk.req_pool_index, text, chunk.start, 2)
        self.write(self.draft, chunk.req_pool_index, text, chunk.start, paired, 2)
        if chunk.next_token is not None:
            return SequenceOutput()
        self.starts[chunk.req_pool_index] = end - 1
        return SequenceOutput((next_token(text),))

    def decode(self, decode: Decode) -> SequenceOutput:
        row, text, length = decode.req_pool_index, tuple(decode.all_tokens), decode.seq_len
        assert len(text) == length + 1
        self.read(self.draft, row, text, self.starts[row], 2)
        self.write(self.draft, row, text, self.starts[row], length, 2)
        self.read(self.draft, row, text, length, 2)
        self.read(self.target, row, text, length, 1)
        accepted = self.rng.randrange(STEPS + 1)
        longer = text
        for _ in range(accepted + 1):
            longer = (*longer, next_token(longer))
        slots = self.kv.table.slots[row, length : length + WINDOW].tolist()
        assert 0 not in slots
        for slot in slots:
            assert slot // self.kv.page_size not in self.cached
            self.target[slot] = self.draft[slot] = GARBAGE
        self.write(self.target, row, longer, length, length + accepted + 1, 1)
        self.starts[row] = length
        return SequenceOutput(longer[length + 1 :], drafted=STEPS)

    def read(self, pool: dict[int, tuple[int, ...]], row: int, tokens: tuple[int, ...], end: int, ahead: int) -> None:
        if pool is self.draft and not self.drafts:
            return
        slots = self.kv.table.slots[row, :end].tolist()
        assert all(pool.get(slot) == tokens[: p + ahead] for p, slot in enumerate(slots))

    def write(
        self, pool: dict[int, tuple[int, ...]], row: int, tokens: tuple[int, ...], start: int, end: int, ahead: int
    ) -> None:
        for p in range(start, end):
            slot = int(self.kv.table.slots[row, p])
            assert slot and slot // self.kv.page_size not in self.cached, "a write to a shared page"
            pool[slot] = tokens[: p + ahead]

    def check_cached(self) -> None:
        """Every cached page holds the KV of its keys."""

        def descend(node: Node, before: tuple[int, ...]) -> None:
            tokens = before + tuple(int(key) & 0xFFFFFFFF for key in node.keys)
            size = self.kv.page_size
            slots = [page * size + i for page in node.pages for i in range(size)]
            for p, slot in enumerate(slots, len(before) - 1):
                assert self.target[slot] == tokens[: p + 1]
                assert not self.drafts or self.draft[slot] == tokens[: p + 2]
            for child in node.children.values():
                descend(child, tokens)

        assert self.kv.radix is not None
        for child in self.kv.radix.root.children.values():
            descend(child, (int(child.keys[0]) >> 32,))


def random_requests(rng: random.Random, longest: int, count: int = 30) -> list[Request]:
    """Prompts with a few common beginnings, many of them equal."""
    beginnings = [[rng.randrange(1, VOCAB) for _ in range(longest)] for _ in range(3)]
    prompts: list[list[int]] = []
    for _ in range(count):
        own = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 12))]
        fresh = (rng.choice(beginnings)[: rng.randrange(longest)] + own)[:longest]
        prompts.append(rng.choice(prompts) if prompts and rng.random() < 0.5 else fresh)
    requests = [
        request(
            i,
            prompt,
            max_tokens=rng.choice((0, 1, 2, 20)),
            prompt_logprobs=rng.random() < 0.1,
            cache_salt=rng.choice((None, None, "a", "b")),
        )
        for i, prompt in enumerate(prompts)
    ]
    return [replace(each, client=rng.choice(("many", "many", "many", "few"))) for each in requests]


def expected_text(each: Request) -> list[int]:
    text = list(each.prompt_token_ids)
    for _ in range(each.sampling.max_tokens):
        text.append(next_token(text))
        if text[-1] == END:
            break
    return text[len(each.prompt_token_ids) :]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafting"])
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_read_the_right_kv_and_end(seed: int, drafts: bool) -> None:
    rng = random.Random(seed)
    page = rng.choice((1, 2, 3, 4, 7, 16))
    longest = rng.choice((20, 60))
    pages = -(-(longest + 20 + WINDOW) // page) + rng.choice((0, 2, 60 // page))
    limits = SchedulerLimits(
        context_length=longest + 20,
        max_running_requests=rng.choice((1, 3, 8)),
        chunked_prefill_size=rng.choice((1, 5, 16, 64)),
        num_lookahead_slots=WINDOW,
        steps=STEPS,
        uses_features=drafts,
    )
    table = PageTable(limits.max_running_requests, limits.context_length + WINDOW, page)
    radix = RadixCache(page, BlockEvents(page, block_size := page * rng.choice((1, 2, 4))))
    kv, mirror = KVCacheManager(PageAllocator(pages, page), table, radix), MirroredBlocks()
    it, worker = Scheduler(limits, kv), RecordingWorker(kv, drafts, rng)
    kv._on_free = worker.forget
    if rng.random() < 0.5:
        admit_without_reserve(it)
    waiting, aborted = random_requests(rng, longest), set[str]()
    requests = {each.request_id: each for each in waiting}
    texts: dict[str, list[int]] = {name: [] for name in requests}
    reasons: dict[str, FinishReason] = {}
    for _ in range(20_000):
        while waiting and rng.random() < 0.4:
            it.add(waiting.pop(), GREEDY, frozenset({END}))
        if rng.random() < 0.03 and it.abort(name := rng.choice(list(requests))):
            aborted.add(name)
        if not it.has_work():
            if not waiting:
                break
            continue
        for delta in it.commit(worker.run(it.schedule())):
            assert delta.cached_tokens < len(requests[delta.request_id].prompt_token_ids)
            texts[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                assert reasons.setdefault(delta.request_id, delta.finish_reason) is delta.finish_reason
        kv.check()
        worker.check_cached()
        mirror.apply(kv.take_events())
        assert mirror.prefixes() == cached_prefixes(radix, block_size)
    assert reasons.keys() | aborted == requests.keys(), "a request did not end"
    for name, each in requests.items():
        whole = expected_text(each)
        assert texts[name] == (whole[: len(texts[name])] if name in aborted else whole)
    assert not kv.allocations
    kv.clear()
    mirror.apply(kv.take_events())
    assert not mirror.blocks
    assert kv.allocator.free_pages == kv.allocator.num_pages
