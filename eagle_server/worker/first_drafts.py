"""A warning for drafts that are read wrongly: nothing fails then, but almost no first draft is accepted."""

from __future__ import annotations

import logging

TREES, LEAST = 200, 0.2  # greedy trees, and the share of them whose first level should be accepted

log = logging.getLogger(__name__)


class FirstDrafts:
    """Counts greedy trees and how many of them had their first level accepted. After TREES of them it judges, once.

    `is_open`: not judged yet. `warning`: the judgement; None: not judged, or enough was accepted. It is also logged.
    """

    def __init__(self, causes: str) -> None:
        """`causes`: what the reason usually is, see `Algorithm.silent_causes`."""
        self.causes, self.trees, self.accepted = causes, 0, 0
        self.is_open = True
        self.warning: str | None = None

    def count(self, *, accepted: bool) -> None:
        """One more tree. After the last one it judges."""
        self.trees += 1
        self.accepted += accepted
        if self.trees == TREES:
            self._judge()

    def _judge(self) -> None:
        self.is_open = False
        if self.accepted < LEAST * self.trees:
            share = round(100 * self.accepted / self.trees)
            self.warning = (
                f"only {share} % of the first drafts were accepted in {self.trees} greedy trees, so the draft may be "
                f"read wrongly. The usual causes: {self.causes}"
            )
            log.warning("%s", self.warning)
