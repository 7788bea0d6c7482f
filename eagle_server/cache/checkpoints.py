"""The bounded store of checkpoints: states of recurrent layers at some lengths of texts, see `cache/states.py`."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_server.cache.node import Node


class Checkpoints:
    """Which rows of the state pool are free, which are held by a node of the prefix cache, and which are taken.

    A row is taken from when a request is to save a state there until the cache has the pages of its text.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = frozenset(rows)
        self._free = list(rows)[::-1]
        self._is_free = set(rows)
        self._nodes: dict[Node, None] = {}  # that hold one, the least recently used first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return len(self._nodes)

    @property
    def taken(self) -> int:
        return len(self.rows) - self.free - self.held

    @property
    def oldest(self) -> Node | None:
        """The node whose checkpoint was saved or restored least recently."""
        return next(iter(self._nodes), None)

    def take(self) -> int | None:
        """A free row; None if there is none."""
        if not self._free:
            return None
        row = self._free.pop()
        self._is_free.remove(row)
        return row

    def give_back(self, row: int) -> None:
        """Free a row that was taken.

        Raises:
            ValueError: it is free already, or no checkpoint, which is a bug of the caller.
        """
        if row not in self.rows or row in self._is_free:
            raise ValueError(f"checkpoint {row} is not in use")
        self._is_free.add(row)
        self._free.append(row)

    def hold(self, node: Node, row: int) -> None:
        """The node holds the row, which was taken, from now on."""
        node.checkpoint = row
        self._nodes[node] = None

    def use(self, node: Node) -> None:
        """The node's checkpoint is restored."""
        del self._nodes[node]
        self._nodes[node] = None

    def drop(self, node: Node) -> None:
        """Free the node's row."""
        assert node.checkpoint is not None
        del self._nodes[node]
        self.give_back(node.checkpoint)
        node.checkpoint = None

    def check(self, nodes: Sequence[Node]) -> None:
        """Assert that exactly these nodes hold rows, all of them different ones."""
        held = [node.checkpoint for node in nodes if node.checkpoint is not None]
        assert {node for node in nodes if node.checkpoint is not None} == self._nodes.keys()
        assert len({*held, *self._free}) == len(held) + len(self._free), "a checkpoint with two owners"
        assert self._is_free == set(self._free)
