"""How much KV outputs are expected to take: learned from the requests that ended, and from preemptions."""

from __future__ import annotations

from collections.abc import Sequence as Seq

_LEAST_CAUTION = 0.5  # ends differ in time, so less than the sum of all outputs is needed at once
_RAISE = 0.2  # of the way to 1, for each preemption
_RELAX = 1 / 64  # of the way back, for each request that ended
_LEAST_WEIGHT = 1 / 16  # of the newest request in the mean


class OutputGrowth:
    """The expected rest of outputs.

    `share`: the mean part of max_tokens that requests use, so that a large default max_tokens reserves no KV that is
    hardly ever used. `caution`: which part of the expected tokens is reserved. Each preemption raises it.
    """

    def __init__(self) -> None:
        self.share, self.caution = 0.5, 1.0
        self._ended = 1  # the first guess counts as one request

    def ended(self, tokens: int, max_tokens: int) -> None:
        """A request has ended with `tokens` output tokens."""
        if max_tokens:
            self._ended += 1
            self.share += (tokens / max_tokens - self.share) * max(1 / self._ended, _LEAST_WEIGHT)
            self.caution += (_LEAST_CAUTION - self.caution) * _RELAX

    def preempted(self) -> None:
        """KV ran out."""
        self.caution += (1 - self.caution) * _RAISE

    def reserve(self, tokens: int, max_tokens: int) -> int:
        """How many more tokens to expect of a request with `tokens` output tokens."""
        rest = max_tokens - tokens
        # An output that is already longer than most will probably go on for a while.
        expected = max(self.share * max_tokens - tokens, self.share * rest / 2)
        return round(self.caution * expected)


def peak_growth(requests: Seq[tuple[int, int]]) -> int:
    """The most pages that requests need at once beyond those they have now, if all grow equally fast.

    Each request is (pages that it will add, pages that it frees at its end). The need is largest just before one ends:
    all that still run have grown as far as it, and those that ended before have freed their pages.
    """
    peak = freed = 0
    for ended, (added, pages) in enumerate(sorted(requests)):
        peak = max(peak, (len(requests) - ended) * added - freed)
        freed += pages
    return peak
