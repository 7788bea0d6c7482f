"""A node of the radix tree, see `cache/radix.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


@dataclass(eq=False)
class Node:
    """A node and the edge to it: `keys` of whole pages, and the ids of these `pages`. `users` counts the locks.

    label: its key in `parent.children`: its first page's keys, after the salt if the parent is the root.
    proven: the target's logits over these pages were finite once.
    queued: the node stands in the heap of leaves.
    start: the number of keys before it.
    checkpoint: of the states of recurrent layers after its last key. None: there is none.
    checkpoints_below: how many there are at its end and at the ends of all nodes below it.
    block_hashes: the blocks that end in it, as they were reported; only if events are recorded.
    """

    keys: Keys
    pages: list[int]
    parent: Node | None  # None: the root, or a node that was removed
    label: bytes = b""
    children: dict[bytes, Node] = field(default_factory=dict)
    users: int = 0
    used_at: int = 0
    proven: bool = False
    queued: bool = False
    start: int = 0
    checkpoint: int | None = None
    checkpoints_below: int = 0
    block_hashes: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The number of keys up to its end."""
        return self.start + len(self.keys)
