"""The next cycle's first forward, computed while the host reads this cycle's results.

It needs nothing from the host, if its requests go on. What was computed for a request that has ended is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.worker.clock import StageClock


class ByRequest(Protocol):
    """A forward's results for the requests of a batch."""

    def of(self, requests: Tensor) -> Self:
        """Those of some requests, int64 [n]."""
        ...


Result = TypeVar("Result", bound=ByRequest)


@dataclass(frozen=True)
class _Computed(Generic[Result]):
    """`rows`: each request's number in the batch, by req_pool_index and the position of its first row."""

    result: Result
    rows: dict[tuple[int, int], int]
    size: int  # of the batch, with padding
    clock: StageClock


class Ahead(Generic[Result]):
    """Holds the results of one forward until the next cycle takes them."""

    def __init__(self) -> None:
        self._computed: _Computed[Result] | None = None

    def put(self, result: Result, requests: Sequence[tuple[int, int]], size: int, clock: StageClock) -> None:
        """Hold what was computed for these pairs of req_pool_index and first row's position, in batch order.

        size: of the batch with its padding, which stands last. clock: of the forward.
        """
        self._computed = _Computed(result, {request: row for row, request in enumerate(requests)}, size, clock)

    def forget(self, released: Iterable[int]) -> None:
        """These requests have ended, or were preempted. Others may get their rows of the page table."""
        gone = set(released)
        if gone and self._computed is not None:
            for request in [each for each in self._computed.rows if each[0] in gone]:
                del self._computed.rows[request]

    def drop(self) -> None:
        """Nothing is taken in this cycle, so what was computed will be out of date."""
        self._computed = None

    def take(self, requests: Sequence[tuple[int, int]], size: int, clock: StageClock) -> Result | None:
        """The results for a batch of these requests, padded to `size`; None: some of them were not computed.

        Adds the forward's time to `clock`.
        """
        computed, self._computed = self._computed, None
        if computed is None:
            return None
        rows = [computed.rows.get(request, -1) for request in requests]
        if min(rows) < 0:
            return None
        clock.take(computed.clock)
        if size == computed.size and rows == list(range(len(rows))):
            return computed.result
        rows += rows[:1] * (size - len(rows))  # padding may be anything
        return computed.result.of(upload(rows, clock.device))
