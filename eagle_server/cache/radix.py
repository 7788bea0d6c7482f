"""The prefix cache: a radix tree that maps bigrams of tokens to KV pages.

A draft head's KV at slot p depends on token p + 1. So the key of slot p is the bigram (token p, token p + 1), and a
match is valid for the KV of the target and of the draft. n tokens give n - 1 keys: the last token of a prompt is always
recomputed. Its logits and features are needed anyway.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


def bigrams(tokens: Sequence[int]) -> Keys:
    """The keys of slots 0..n-2, for n tokens."""
    ids = np.asarray(tokens, dtype=np.int64)
    return (ids[:-1] << 32) | ids[1:]


@dataclass(eq=False)
class Node:
    """A node and the edge to it: `keys` of whole pages, and the ids of these `pages`. `users` counts the locks."""

    keys: Keys
    pages: list[int]
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    users: int = 0
    used_at: int = 0


@dataclass(frozen=True)
class Match:
    """The longest cached prefix: its pages in order, and its last node, the argument of `lock` and `unlock`."""

    node: Node
    pages: list[int]


class RadixCache:
    """Longest-prefix lookup, insertion, and eviction of the least recently used leaves that are not locked."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(np.empty(0, dtype=np.int64), [], None, users=1)
        self.cached_pages = 0
        self.evictable_pages = 0
        self._clock = itertools.count(1)

    def match(self, keys: Keys) -> Match:
        """The longest cached prefix of `keys`, in whole pages."""
        node, pages = self._walk(keys)
        return Match(node, pages)

    def insert(self, keys: Keys, pages: Sequence[int]) -> list[int]:
        """Store `pages` for the whole pages of `keys`. Returns duplicates: pages whose prefix was already cached."""
        count = len(keys) // self.page_size
        keys, pages = keys[: count * self.page_size], list(pages[:count])
        node, present = self._walk(keys)
        rest = keys[len(present) * self.page_size :]
        if len(rest):
            child = Node(rest, pages[len(present) :], node, used_at=next(self._clock))
            node.children[self._first(rest)] = child
            self.cached_pages += len(child.pages)
            self.evictable_pages += len(child.pages)
        return [mine for mine, theirs in zip(pages, present, strict=False) if mine != theirs]

    def lock(self, node: Node) -> None:
        """Protect the pages from the root to `node` from eviction."""
        for each in self._path(node):
            if each.users == 0:
                self.evictable_pages -= len(each.pages)
            each.users += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`."""
        for each in self._path(node):
            each.users -= 1
            if each.users == 0:
                self.evictable_pages += len(each.pages)

    def evict(self, count: int) -> list[int]:
        """Evict `count` pages, or all that are not locked. The least recently used leaves go first, from their ends."""
        leaves = [(n.used_at, id(n), n) for n in self._nodes() if not n.children and n.users == 0]
        heapq.heapify(leaves)
        freed: list[int] = []
        while leaves and len(freed) < count:
            _, _, leaf = heapq.heappop(leaves)
            parent, kept = leaf.parent, max(0, len(leaf.pages) - (count - len(freed)))
            assert parent is not None
            freed.extend(leaf.pages[kept:])
            if kept:
                leaf.keys, leaf.pages = leaf.keys[: kept * self.page_size], leaf.pages[:kept]
                break
            del parent.children[self._first(leaf.keys)]
            if parent is not self.root and not parent.children and parent.users == 0:
                heapq.heappush(leaves, (parent.used_at, id(parent), parent))
        self.cached_pages -= len(freed)
        self.evictable_pages -= len(freed)
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

    def _walk(self, keys: Keys) -> tuple[Node, list[int]]:
        node, pages, start, now = self.root, list[int](), 0, next(self._clock)
        while start + self.page_size <= len(keys):
            child = node.children.get(self._first(keys[start:]))
            if child is None:
                break
            shared = self._shared_pages(child.keys, keys[start:])
            if shared < len(child.pages):
                child = self._split(child, shared)
            child.used_at = now
            pages.extend(child.pages)
            start += len(child.keys)
            node = child
        return node, pages

    def _shared_pages(self, left: Keys, right: Keys) -> int:
        n = min(len(left), len(right))
        differ = np.flatnonzero(left[:n] != right[:n])
        return int(differ[0] if len(differ) else n) // self.page_size

    def _split(self, node: Node, pages: int) -> Node:
        """Split a node after `pages` pages. Returns the upper half."""
        cut = pages * self.page_size
        assert node.parent is not None
        upper = Node(node.keys[:cut], node.pages[:pages], node.parent, users=node.users, used_at=node.used_at)
        node.parent.children[self._first(upper.keys)] = upper
        node.keys, node.pages, node.parent = node.keys[cut:], node.pages[pages:], upper
        upper.children[self._first(node.keys)] = node
        return upper

    def _first(self, keys: Keys) -> bytes:
        return keys[: self.page_size].tobytes()

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
