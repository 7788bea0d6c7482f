"""A warning for drafts that are read wrongly: nothing fails then, but almost no first draft is accepted."""

from __future__ import annotations

import logging
from collections.abc import Collection

from eagle_server.plan import CyclePlan, CycleResult

CYCLES, LEAST = 200, 0.2  # greedy trees, and the share of them whose first level should be accepted

log = logging.getLogger(__name__)


class FirstDrafts:
    """Counts greedy trees whose first level was accepted, and warns once. `causes`: what the reason usually is."""

    def __init__(self, causes: str) -> None:
        self.causes, self._trees, self._accepted = causes, 0, 0

    def count(self, plan: CyclePlan, result: CycleResult, drafting: Collection[int]) -> None:
        """The trees of a cycle. `drafting`: the numbers of the decodes that drafted. Warm-up has no text."""
        if self._trees >= CYCLES:
            return
        for number in drafting:
            decode, output = plan.decodes[number], result.decodes[number]
            if decode.text and output.drafted and decode.sampling.params.temperature == 0:
                self._trees += 1
                self._accepted += len(output.tokens) > 1
        if self._trees >= CYCLES and self._accepted < LEAST * self._trees:
            log.warning(
                "only %d %% of the first drafts were accepted in %d greedy trees, so the draft may be read wrongly: "
                "%s; the start-up line says how it is read, and --speculative-draft-config-override changes it",
                *(round(100 * self._accepted / self._trees), self._trees, self.causes),
            )
