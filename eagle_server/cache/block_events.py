"""What enters and leaves the prefix cache, as vLLM's KV events: routers rebuild from them what a server has cached.

A block is `block_size` tokens: a page, or several small ones. It is cached as long as the page at its end is, since a
page is never cached without those before it. Its hash depends on its tokens, on the hash of the block before it, and
for the first one on the salt; on nothing else, so it is the same in every process.

Two pages may hold the same tokens and differ in the token after them, see `cache/radix.py`. The events report them as
one block. So a request may find one page less than the reported blocks have.

With recurrent layers a block is reported while a checkpoint at its end or after it can be restored. A prompt that
departs from a cached text between two checkpoints finds less than the reported blocks: up to the checkpoint before.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec
import numpy as np

from eagle_server.cache.node import Keys, Node

LEAST_BLOCK = 16  # tokens; vLLM's default. An event for every token of a page of one would cost too much
MEDIUM = "GPU"  # vLLM's name for the memory that attention reads, also where that is a CPU's


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks were cached. `token_ids` are those of all of them.

    The hash before the first block is None at the beginning of a text. `extra_keys` has (salt,) for the first block of
    a text with a salt and None for others; it is left out if no block has a salt.
    """

    block_hashes: list[int]  # unsigned, 64 bits
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """These blocks are not cached any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is cached."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


def block_size_of(page_size: int) -> int:
    """Tokens of a block: whole pages, and at least LEAST_BLOCK."""
    return -(-LEAST_BLOCK // page_size) * page_size


def block_hash(parent: int | None, tokens: Keys, salt: str | None = None) -> int:
    """The hash of a block after `parent`. `salt`: of the first block of a text."""
    before = (parent or 0).to_bytes(8, "little")
    text = before + tokens.astype("<i4").tobytes() + (salt or "").encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class BlockEvents:
    """Records the events of one radix tree, which calls `stored`, `split`, `removed` and `cleared`."""

    def __init__(self, page_size: int, block_size: int) -> None:
        """`block_size`: a multiple of `page_size`."""
        self.page_size, self.block_size = page_size, block_size
        self._pages = Counter[int]()  # how many cached pages end a block with this hash
        self._events: list[BlockEvent] = [AllBlocksCleared()]  # voids the events of an earlier process

    def take(self) -> list[BlockEvent]:
        """The events since the last call, in their order."""
        events, self._events = self._events, []
        return events

    def stored(self, node: Node, salt: str | None) -> None:
        """A node of the tree can be found from now on. All nodes above it can."""
        assert node.parent is not None
        first, end = node.start // self.block_size, node.end // self.block_size
        if first == end:
            return
        blocks, parent, hashes = self._tokens(node, first, end), _last_hash(node.parent), list[int]()
        for tokens in blocks:
            above = hashes[-1] if hashes else parent
            hashes.append(block_hash(above, tokens, salt if above is None else None))
        node.block_hashes = hashes.copy()
        self._pages.update(hashes)
        if self._pages[hashes[0]] > 1:  # stored before, in a page with another next token; later blocks are new
            blocks, parent, hashes = blocks[1:], hashes[0], hashes[1:]
        if hashes:
            self._events.append(_stored(hashes, parent, blocks, salt if parent is None else None))

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was cut off from the beginning of `lower`. The pages are the same."""
        count = lower.start // self.block_size - upper.start // self.block_size
        upper.block_hashes, lower.block_hashes = lower.block_hashes[:count], lower.block_hashes[count:]

    def removed(self, node: Node, kept: int) -> None:
        """All pages of a node but the first `kept` cannot be found any more."""
        count = (node.start + kept * self.page_size) // self.block_size - node.start // self.block_size
        gone = list[int]()
        while len(node.block_hashes) > count:
            last = node.block_hashes.pop()
            self._pages[last] -= 1
            if not self._pages[last]:
                del self._pages[last]
                gone.append(last)
        if gone and self._events and isinstance(self._events[-1], BlockRemoved):
            self._events[-1].block_hashes.extend(gone)
        elif gone:
            self._events.append(BlockRemoved(gone, MEDIUM))

    def cleared(self) -> None:
        """The tree is empty. What happened before does not matter any more."""
        assert not self._pages
        self._events = [AllBlocksCleared()]

    def _tokens(self, node: Node, first: int, end: int) -> Keys:
        """The tokens of blocks first..end-1, of which the last ones end in `node`: int64 [blocks, block_size]."""
        parts, start, above = [node.keys], node.start, node.parent
        while start > first * self.block_size:
            assert above is not None
            parts.append(above.keys)
            start, above = above.start, above.parent
        keys = np.concatenate(parts[::-1])[first * self.block_size - start : end * self.block_size - start]
        return (keys >> 32).reshape(-1, self.block_size)


def _stored(hashes: list[int], parent: int | None, blocks: Keys, salt: str | None) -> BlockStored:
    """The event of these blocks. `salt`: of the first one."""
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=blocks.reshape(-1).tolist(),
        block_size=blocks.shape[1],
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        extra_keys=[(salt,), *[None] * (len(hashes) - 1)] if salt else None,
    )


def _last_hash(node: Node | None) -> int | None:
    """The hash of the last block that ends in `node` or above it."""
    while node is not None and not node.block_hashes:
        node = node.parent
    return None if node is None else node.block_hashes[-1]
