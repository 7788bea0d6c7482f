"""A restored state is its text's, and no checkpoint is lost, after any sequence of prompts, hits and evictions."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.block_events import BlockEvents
from eagle_server.cache.checkpoints import Checkpoints
from eagle_server.cache.manager import KVAllocation, KVCacheManager
from eagle_server.cache.node import Node
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.radix import RadixCache, bigrams
from tests.support.kv_events import MirroredBlocks, reachable_prefixes

ROWS, WIDTH, BLOCK = 3, 96, 4
Text = tuple[str | None, tuple[int, ...]]  # a salt, and the tokens before a state
PROMPTS = st.tuples(
    st.integers(0, 15), st.lists(st.integers(1, 3), min_size=2, max_size=20), st.sampled_from([None, None, "a"])
)


def manager(pages: int, checkpoints: int, page_size: int = 1) -> KVCacheManager:
    store = Checkpoints(range(ROWS + 1, ROWS + 1 + checkpoints))
    radix = RadixCache(page_size, BlockEvents(page_size, BLOCK), store)
    return KVCacheManager(PageAllocator(pages, page_size), PageTable(ROWS, WIDTH, page_size), radix)


class Running:
    """A request, how many of its tokens are computed, and from which length on its state can be saved."""

    def __init__(self, allocation: KVAllocation, tokens: list[int], computed: int) -> None:
        self.allocation, self.tokens, self.computed, self.state_from = allocation, tokens, computed, computed


class CheckpointsUnderRandomUse(RuleBasedStateMachine):
    """The model is a dictionary: which text's state every row of the pool has. Rows that are free have none."""

    @initialize(page_size=st.sampled_from([1, 2]), pages=st.integers(20, 120), checkpoints=st.integers(0, 5))
    def start(self, page_size: int, pages: int, checkpoints: int) -> None:
        self.kv = manager(pages, checkpoints, page_size)
        self.state: dict[int, Text] = {}
        self.running: list[Running] = []
        self.mirror = MirroredBlocks()

    @rule(
        prompts=st.lists(PROMPTS, max_size=2),
        wanted=st.sets(st.integers(1, 60), max_size=4),
        steps=st.lists(st.integers(1, 40), min_size=ROWS, max_size=ROWS),
        ends=st.lists(st.sampled_from(["goes on", "ends", "fails"]), min_size=ROWS, max_size=ROWS),
        lag=st.integers(0, 5),
    )
    def cycle(
        self,
        prompts: list[tuple[int, list[int], str | None]],
        wanted: set[int],
        steps: list[int],
        ends: list[str],
        lag: int,
    ) -> None:
        """As the engine: admission; then states are saved and restored; then chunks, which save; then the results."""
        for common, rest, salt in prompts:
            self.admit([1, 2, 3] * common + rest, salt)
        self.move()
        for request, step in zip(self.running, steps, strict=False):
            self.compute(request, step, wanted)
        for request, end in list(zip(self.running, ends, strict=False)):
            if end != "goes on" or request.computed == len(request.tokens) - 1:
                self.running.remove(request)
                written = max(request.allocation.shared * self.kv.page_size, request.computed - lag)
                state_from = request.state_from if end != "fails" else None
                tokens, suspect = request.tokens, end == "fails"
                self.kv.release(request.allocation, tokens, written, suspect=suspect, state_from=state_from)

    def admit(self, tokens: list[int], salt: str | None) -> None:
        match = self.kv.match(bigrams(tokens), salt)
        allocation = self.kv.allocate(match, len(tokens), salt=salt)
        if allocation is not None:
            self.running.append(Running(allocation, tokens, allocation.shared * self.kv.page_size))

    def move(self) -> None:
        moves = self.kv.take_moves()
        for save in moves.saves:
            salt, tokens = self.state[save.req_pool_index]
            self.state[save.checkpoint] = (salt, tokens[: save.length])
        for checkpoint, row in moves.restores:
            self.state[row] = self.state[checkpoint]
        for request in self.running:
            if request.allocation.req_pool_index in {row for _, row in moves.restores}:
                expected = (request.allocation.salt, tuple(request.tokens[: request.computed]))
                assert self.state[request.allocation.req_pool_index] == expected, "the state of another text"

    def compute(self, request: Running, step: int, wanted: set[int]) -> None:
        allocation, before = request.allocation, request.computed
        after = min(len(request.tokens) - 1, before + step)
        if after == before:
            return
        for length in sorted(wanted):
            if before < length <= after and length % self.kv.page_size == 0:
                save = self.kv.save_state(allocation, length)
                if save is not None:
                    self.state[save.checkpoint] = (allocation.salt, tuple(request.tokens[:length]))
        request.computed = after
        request.state_from = before + (after - before) // 2  # as after an accepted path
        self.state[allocation.req_pool_index] = (allocation.salt, tuple(request.tokens[:after]))
        self.kv.publish(allocation, request.tokens, after)

    @rule()
    def clear(self) -> None:
        self.kv.clear()
        if not self.running:
            assert self.kv.radix is not None
            assert self.kv.radix.checkpoints is not None
            assert self.kv.radix.checkpoints.free == len(self.kv.radix.checkpoints.rows)

    @invariant()
    def nothing_is_lost_and_every_held_checkpoint_is_right(self) -> None:
        self.kv.check()
        assert self.kv.radix is not None
        pending = {save.checkpoint: save for save in self.kv._saves}
        for node in self.kv.radix._nodes():
            if node.checkpoint is not None and node.checkpoint not in pending:
                salt, tokens = self.state[node.checkpoint]
                assert (*tokens,) == text_of(self.kv.radix, node)
                assert salt == salt_of(self.kv.radix, node)
        self.mirror.apply(self.kv.take_events())
        assert self.mirror.prefixes() == reachable_prefixes(self.kv.radix, BLOCK)

    def teardown(self) -> None:
        for request in self.running:
            self.kv.release(request.allocation, request.tokens, request.computed, state_from=request.state_from)
        self.kv.clear()
        self.kv.check_counts()


def text_of(radix: RadixCache, node: Node) -> tuple[int, ...]:
    keys = [each.keys >> 32 for each in radix._path(node)][::-1]
    return tuple(int(token) for part in keys for token in part)


def salt_of(radix: RadixCache, node: Node) -> str | None:
    top = list(radix._path(node))[-1]
    return top.label[: -8 * radix.page_size].decode() or None


TestCheckpointsUnderRandomUse = CheckpointsUnderRandomUse.TestCase
TestCheckpointsUnderRandomUse.settings = settings(max_examples=100, stateful_step_count=25)
