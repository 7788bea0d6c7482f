"""The prefix cache: a radix tree that maps bigrams of tokens to KV pages.

A draft head's KV at slot p depends on token p + 1. So the key of slot p is the bigram (token p, token p + 1), and a
match is valid for the KV of the target and of the draft. n tokens give n - 1 keys: the last token of a prompt is always
recomputed. Its logits and features are needed anyway.

Requests with different salts share nothing: the salt is part of the first page's key.

With recurrent layers a request can go on only from a length whose state was saved. So a hit ends at the last checkpoint
before the end of what is cached.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_server.cache.block_events import BlockEvents
from eagle_server.cache.checkpoints import Checkpoints
from eagle_server.cache.node import Keys, Node


def bigrams(tokens: Sequence[int]) -> Keys:
    """The keys of slots 0..n-2, for n tokens."""
    ids = np.asarray(tokens, dtype=np.int64)
    return (ids[:-1] << 32) | ids[1:]


def common_pages(left: Keys, right: Keys, page_size: int) -> int:
    """How many whole pages of two key sequences are equal, from the first on."""
    n = min(len(left), len(right))
    differ = np.flatnonzero(left[:n] != right[:n])
    return int(differ[0] if len(differ) else n) // page_size


@dataclass(frozen=True)
class Match:
    """The longest cached prefix: its pages in order, and its last node, the argument of `lock` and `unlock`.

    cached_pages: how many pages are cached. With recurrent layers those after the last checkpoint cannot be used.
    """

    node: Node
    pages: list[int]
    cached_pages: int = 0


class RadixCache:
    """Longest-prefix lookup, insertion, and eviction of the least recently used leaves that are not locked.

    `_leaves` is a heap of (used_at, id, node). Every leaf that may be evicted stands in it once. A node that is used
    again stays where it is: `evict` skips it, or puts it back with its new time. So a lookup changes no heap.
    `events`: record what is cached and what is not any more. `checkpoints`: hits end at one of these; None: they end
    where the cached text ends.
    """

    def __init__(
        self, page_size: int, events: BlockEvents | None = None, checkpoints: Checkpoints | None = None
    ) -> None:
        self.page_size, self.events, self.checkpoints = page_size, events, checkpoints
        self.root = Node(np.empty(0, dtype=np.int64), [], None, users=1)
        self.cached_pages = 0
        self.evictable_pages = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._clock = itertools.count(1)

    def match(self, keys: Keys, salt: str | None = None) -> Match:
        """The longest cached prefix of `keys`, in whole pages, among those that were stored with this salt."""
        match = self._walk(self.root, keys, salt)
        node = match.node if self.checkpoints is None else self._last_checkpoint(match.node)
        return Match(node, match.pages[: node.end // self.page_size], len(match.pages))

    def insert(self, keys: Keys, pages: Sequence[int], below: Node | None = None, salt: str | None = None) -> Match:
        """Store `pages` for the whole pages of `keys`, which continue the node `below`, by default the root.

        Returns the end of `keys` in the tree, and the pages that were cached already for their first pages. The
        caller keeps as many of its own.
        """
        count = len(keys) // self.page_size
        present = self._walk(below or self.root, keys[: count * self.page_size], salt)
        rest = keys[len(present.pages) * self.page_size : count * self.page_size]
        if not len(rest):
            return present
        # A copy, because `keys` may be a part of a longer array, which must not stay alive.
        rest, parent = rest.copy(), present.node
        child = Node(rest, list(pages[len(present.pages) : count]), parent, self._label(parent, rest, salt))
        child.used_at, child.start = next(self._clock), parent.end
        parent.children[child.label] = child
        if self.events is not None and self.checkpoints is None:
            self.events.stored(child, salt)
        self.cached_pages += len(child.pages)
        self.evictable_pages += len(child.pages)
        self._queue(child)
        return Match(child, present.pages)

    def lock(self, node: Node, above: Node | None = None) -> None:
        """Protect the pages from the root to `node` from eviction; with `above`, those after that node only."""
        for ancestor in self._path(node):
            if ancestor is above:
                break
            if ancestor.users == 0:
                self.evictable_pages -= len(ancestor.pages)
            ancestor.users += 1

    def unlock(self, node: Node) -> None:
        """Undo the locks of the path to `node`."""
        now = next(self._clock)
        for ancestor in self._path(node):
            ancestor.users -= 1
            if ancestor.users == 0:
                self.evictable_pages += len(ancestor.pages)
                ancestor.used_at = now
                self._queue(ancestor)

    def take_checkpoint(self) -> int | None:
        """A row for a checkpoint, if need be that of the least recently used one. None: all will be saved to soon."""
        assert self.checkpoints is not None
        row, oldest = self.checkpoints.take(), self.checkpoints.oldest
        if row is None and oldest is not None:
            self._drop_checkpoint(oldest)
            row = self.checkpoints.take()
        return row

    def hold_checkpoint(self, node: Node, length: int, row: int, salt: str | None) -> None:
        """Keep a checkpoint of the first `length` keys of the path to `node`, whole pages, which has this salt."""
        assert self.checkpoints is not None
        while node.start >= length:
            assert node.parent is not None
            node = node.parent
        if node.end > length:
            node = self._split(node, (length - node.start) // self.page_size)
        assert node.end == length, "a checkpoint must end with a page"
        if node.checkpoint is not None:  # another request has computed the same text
            self.checkpoints.give_back(row)
            return
        self.checkpoints.hold(node, row)
        for above in reversed(list(self._path(node))):
            above.checkpoints_below += 1
            if self.events is not None and above.checkpoints_below == 1:
                self.events.stored(above, salt)

    def checkpointed(self, node: Node) -> int:
        """Where the last checkpoint of the path to `node` is: a number of keys, 0 without one."""
        return self._last_checkpoint(node).end

    def sole_pages(self, node: Node) -> int:
        """How many pages of the path to `node` have only one lock."""
        return sum(
            len(ancestor.pages)
            for ancestor in itertools.takewhile(lambda ancestor: ancestor.users == 1, self._path(node))
        )

    def prove(self, node: Node) -> None:
        """The target's logits after the path to `node` were finite."""
        for ancestor in self._path(node):
            if ancestor.proven:
                break
            ancestor.proven = True

    def discard(self, node: Node) -> list[int]:
        """Remove the end of the path to `node`, as far as it is not proven, not locked and continued by no other."""
        freed: list[int] = []
        while not node.proven and not node.children and node.users == 0:
            assert node.parent is not None
            freed.extend(node.pages)
            self._drop_checkpoint(node)
            if self.events is not None:
                self.events.removed(node, 0)
            node = self._remove(node)
        self._queue(node)
        self.cached_pages -= len(freed)
        self.evictable_pages -= len(freed)
        return freed

    def evict(self, count: int) -> list[int]:
        """Evict `count` pages, or all that are not locked. The least recently used leaves go first, from their ends."""
        freed: list[int] = []
        while self._leaves and len(freed) < count:
            used_at, _, leaf = heapq.heappop(self._leaves)
            leaf.queued = False
            kept = max(0, len(leaf.pages) - (count - len(freed)))
            if leaf.parent is None or leaf.used_at != used_at:
                self._queue(leaf)
            elif not leaf.children and leaf.users == 0:
                freed.extend(leaf.pages[kept:])
                self._drop_checkpoint(leaf)
                if self.events is not None:
                    self.events.removed(leaf, kept)
                if kept:
                    del leaf.pages[kept:]
                    leaf.keys = leaf.keys[: kept * self.page_size]
                self._queue(leaf if kept else self._remove(leaf))
        self.cached_pages -= len(freed)
        self.evictable_pages -= len(freed)
        return freed

    def clear(self) -> list[int]:
        """Evict all pages that are not locked."""
        freed = self.evict(self.evictable_pages)
        if self.events is not None and not self.cached_pages:
            self.events.cleared()
        return freed

    def pages(self) -> list[int]:
        """All cached pages, for the allocator's check."""
        return [page for node in self._nodes() for page in node.pages]

    def check(self) -> None:
        """Assert that the counters agree with the tree."""
        nodes = list(self._nodes())
        assert self.cached_pages == sum(len(n.pages) for n in nodes)
        assert self.evictable_pages == sum(len(n.pages) for n in nodes if n.users == 0)
        for node in nodes:
            assert len(node.keys) == len(node.pages) * self.page_size
            assert node.users >= sum(child.users for child in node.children.values())
            assert node.parent is not None and node.parent.children[node.label] is node
            assert node.queued or node.users or node.children, "a leaf that would never be evicted"
            assert node.start == node.parent.end
            below = sum(child.checkpoints_below for child in node.children.values())
            assert node.checkpoints_below == below + (node.checkpoint is not None)
        if self.checkpoints is not None:
            self.checkpoints.check(nodes)
        assert sum(node.queued for node in nodes) == sum(leaf.parent is not None for *_, leaf in self._leaves)

    def _walk(self, node: Node, keys: Keys, salt: str | None) -> Match:
        """The longest cached prefix of `keys`, which continue `node`."""
        pages, start, now = list[int](), 0, next(self._clock)
        while start + self.page_size <= len(keys):
            child = node.children.get(self._label(node, keys[start:], salt))
            if child is None:
                break
            shared = common_pages(child.keys, keys[start:], self.page_size)
            if shared < len(child.pages):
                child = self._split(child, shared)
            child.used_at = now
            pages.extend(child.pages)
            start += len(child.keys)
            node = child
        return Match(node, pages)

    def _last_checkpoint(self, node: Node) -> Node:
        """The last node with a checkpoint on the path to `node`, or the root."""
        return next((each for each in self._path(node) if each.checkpoint is not None), self.root)

    def _drop_checkpoint(self, node: Node) -> None:
        """Free the node's checkpoint, if it has one. Blocks that no hit reaches any more are reported as removed."""
        if self.checkpoints is None or node.checkpoint is None:
            return
        self.checkpoints.drop(node)
        for above in self._path(node):
            above.checkpoints_below -= 1
            if self.events is not None and not above.checkpoints_below:
                self.events.removed(above, 0)

    def _remove(self, leaf: Node) -> Node:
        """Take a leaf out of the tree. Returns its parent."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.label]
        leaf.parent = None
        return parent

    def _queue(self, node: Node) -> None:
        """Put a leaf that may be evicted into the heap, if it is not there."""
        if node.parent is not None and not (node.queued or node.children or node.users):
            node.queued = True
            heapq.heappush(self._leaves, (node.used_at, id(node), node))

    def _split(self, node: Node, pages: int) -> Node:
        """Split a node after `pages` pages. Returns the upper half."""
        cut = pages * self.page_size
        assert node.parent is not None
        upper = Node(node.keys[:cut], node.pages[:pages], node.parent, node.label)
        upper.users, upper.used_at, upper.proven = node.users, node.used_at, node.proven
        upper.start, upper.checkpoints_below = node.start, node.checkpoints_below
        node.parent.children[upper.label] = upper
        node.keys, node.pages, node.parent, node.start = node.keys[cut:], node.pages[pages:], upper, node.start + cut
        if self.events is not None:
            self.events.split(upper, node)
        node.label = self._label(upper, node.keys, None)
        upper.children[node.label] = node
        return upper

    def _label(self, parent: Node, keys: Keys, salt: str | None) -> bytes:
        """The name of a child among its parent's children: its first page, after the salt below the root.

        All pages have the same length, so children with different salts never have the same label.
        """
        first = keys[: self.page_size].tobytes()
        return salt.encode() + first if salt and parent is self.root else first

    def _path(self, node: Node) -> Iterator[Node]:
        current: Node | None = node
        while current is not None and current is not self.root:
            yield current
            current = current.parent

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
