"""Cuts the output at stop strings."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts text at the first stop string, or after it. Holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the stop string itself is part of the text."""
        self._stops, self._keep = tuple(stops), keep
        self._longest, self._firsts = max(map(len, stops), default=0), {stop[:1] for stop in stops}
        self._held = ""
        self.match: str | None = None  # the stop string that was found

    @property
    def found(self) -> bool:
        return self.match is not None

    def push(self, text: str) -> str:
        """The text that cannot belong to a stop string. Empty after a stop string was found."""
        if self.found:
            return ""
        text = self._held + text
        cuts = [(cut, cut + len(stop) * self._keep, stop) for stop in self._stops if (cut := text.find(stop)) >= 0]
        if cuts:
            _, end, self.match = min(cuts)
            self._held = ""
            return text[:end]
        kept = self._prefix_length(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """The text that was held back."""
        text, self._held = self._held, ""
        return text

    def _prefix_length(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        if not any(first in text for first in self._firsts):
            return 0
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
