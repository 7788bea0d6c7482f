"""The next cycle's first forward, computed while the host reads this cycle's results.

It needs nothing from the host, if its requests go on. What was computed for a request that has ended is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.worker.clock import UNUSED, StageClock


class ByRequest(Protocol):
    """A forward's results for the requests of a batch."""

    def rows_of(self, requests: Tensor) -> Self:
        """The results for some requests, int64 [n]."""
        ...


Result = TypeVar("Result", bound=ByRequest)


@dataclass(frozen=True)
class _Computed(Generic[Result]):
    """`numbers`: each request's number in the batch, by req_pool_index and the position of its first row."""

    result: Result
    numbers: dict[tuple[int, int], int]
    size: int  # of the batch, with padding
    clock: StageClock


class ForwardAhead(Generic[Result]):
    """Holds the results of one forward for the next cycle, which takes or discards them."""

    def __init__(self) -> None:
        self._computed: _Computed[Result] | None = None

    def put(self, result: Result, requests: Sequence[tuple[int, int]], size: int, clock: StageClock) -> None:
        """Hold what was computed for these pairs of req_pool_index and first row's position, in batch order.

        size: of the batch with its padding, which stands last. clock: of the forward.
        """
        self._computed = _Computed(result, {request: number for number, request in enumerate(requests)}, size, clock)

    def forget(self, released: Iterable[int]) -> None:
        """These requests have ended, or were preempted. Others may get their rows of the page table."""
        gone = set(released)
        if gone and self._computed is not None:
            for request in [computed for computed in self._computed.numbers if computed[0] in gone]:
                del self._computed.numbers[request]

    def take(self, requests: Sequence[tuple[int, int]], size: int, clock: StageClock) -> Result | None:
        """The results for a batch of these requests, padded to `size`; None: some of them were not computed.

        Adds the forward's time to `clock`.
        """
        computed = self._computed
        numbers = [-1] if computed is None else [computed.numbers.get(request, -1) for request in requests]
        if computed is None or min(numbers) < 0:
            return None
        self._computed = None
        clock.take(computed.clock)
        if size == computed.size and numbers == list(range(len(numbers))):
            return computed.result
        numbers += numbers[:1] * (size - len(numbers))  # padding may be anything
        return computed.result.rows_of(upload(numbers, clock.device))

    def discard(self, clock: StageClock) -> None:
        """Drop what this cycle has not taken, and add its time to `clock` as UNUSED. It is out of date afterwards."""
        if self._computed is not None:
            clock.take(self._computed.clock, UNUSED)
        self._computed = None
