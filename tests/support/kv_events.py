"""A router's view of a prefix cache: rebuilt from KV events alone, to be compared with the real tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import zmq

from eagle_server.cache.block_events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from eagle_server.cache.node import Node
from eagle_server.cache.radix import RadixCache
from eagle_server.engine.kv_events import END_OF_REPLAY

Prefix = tuple[str | None, tuple[int, ...]]  # the salt, and the tokens of one or more whole blocks


@dataclass
class MirroredBlocks:
    """The blocks by their hashes: the hash of the block before, the salt, and the tokens."""

    blocks: dict[int, tuple[int | None, str | None, tuple[int, ...]]] = field(default_factory=dict)

    def apply(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for each in event.block_hashes:
                        del self.blocks[each]
                case AllBlocksCleared():
                    self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert event.block_hashes
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert parent is None or parent in self.blocks, "a block without the one before it"
        extra = event.extra_keys or [None] * len(event.block_hashes)
        for number, (each, keys) in enumerate(zip(event.block_hashes, extra, strict=True)):
            assert each not in self.blocks, "a block is stored twice"
            assert keys is None or parent is None, "only the first block of a text has a salt"
            tokens = tuple(event.token_ids[number * size : (number + 1) * size])
            self.blocks[each] = (parent, None if keys is None else keys[0], tokens)
            parent = each

    def prefixes(self) -> set[Prefix]:
        """Every cached prefix of whole blocks. A block without the one before it fails."""
        return {self._prefix(each) for each in self.blocks}

    def _prefix(self, block: int) -> Prefix:
        parent, salt, tokens = self.blocks[block]
        if parent is None:
            return salt, tokens
        first, before = self._prefix(parent)
        return first, before + tokens


def cached_prefixes(radix: RadixCache, block_size: int) -> set[Prefix]:
    """The same from the tree itself."""
    return _prefixes(radix, block_size, least=0)


def reachable_prefixes(radix: RadixCache, block_size: int) -> set[Prefix]:
    """Those that end at a checkpoint or before one."""
    return _prefixes(radix, block_size, least=1)


def _prefixes(radix: RadixCache, block_size: int, *, least: int) -> set[Prefix]:
    """Prefixes in nodes with at least so many checkpoints at their ends and below."""
    found: set[Prefix] = set()

    def descend(node: Node, salt: str | None, before: tuple[int, ...]) -> None:
        if node.checkpoints_below < least:
            return
        tokens = before + tuple((node.keys >> 32).tolist())
        ends = range(block_size, len(tokens) + 1, block_size)
        found.update((salt, tokens[:end]) for end in ends if end > len(before))
        for child in node.children.values():
            descend(child, salt, tokens)

    for label, node in radix.root.children.items():
        descend(node, label[: -8 * radix.page_size].decode() or None, ())
    return found


class KVEventSubscriber:
    """Follows a publisher. It asks for a replay when it misses a batch, which is also how it notices a restart."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context = zmq.Context()
        self.mirror, self.replays = MirroredBlocks(), 0
        self.next: int | None = None  # the sequence number after the newest batch
        self._publications = self._context.socket(zmq.SUB)
        self._publications.subscribe(b"")
        self._publications.connect(endpoint)
        self._requests = self._context.socket(zmq.DEALER)
        self._requests.connect(replay_endpoint)

    def follow(self, quiet: float = 0.3) -> None:
        """Read until no batch arrives for `quiet` seconds."""
        while self._publications.poll(round(1000 * quiet)):
            _, number, batch = self._publications.recv_multipart()
            if self.next is None or int.from_bytes(number, "big") > self.next:
                self.replay()
            self._take(number, batch)

    def replay(self, patience: float = 10.0) -> None:
        """Get all batches from the next one on."""
        self.replays += 1
        self._requests.send_multipart((b"", (self.next or 0).to_bytes(8, "big")))
        while True:
            assert self._requests.poll(round(1000 * patience)), "no answer"
            _, _, number, batch = self._requests.recv_multipart()
            if number == END_OF_REPLAY:
                return
            self._take(number, batch)

    def _take(self, number: bytes, batch: bytes) -> None:
        sequence = int.from_bytes(number, "big")
        if self.next is not None and sequence < self.next:
            return  # it came with a replay
        _, events, rank = msgspec.msgpack.decode(batch, type=tuple[float, list[BlockEvent], int])
        assert rank == 0
        self.mirror.apply(events)
        self.next = sequence + 1

    def close(self) -> None:
        self._publications.close(linger=0)
        self._requests.close(linger=0)
        self._context.term()
