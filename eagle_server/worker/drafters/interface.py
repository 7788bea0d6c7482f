"""What a drafter is: something that ends in a tree of candidate tokens. The cycle knows no drafter by name."""

from __future__ import annotations

from typing import Protocol

from eagle_server.speculation.draft_input import EagleDraftInput
from eagle_server.speculation.tree import Candidates
from eagle_server.worker.batch import DecodeBatch, ExtendBatch


class Drafter(Protocol):
    """`window` is how many lookahead slots per request its drafting writes; `feeds` whether it needs extending."""

    window: int
    feeds: bool

    def extend(self, work: ExtendBatch | None, batch: DecodeBatch | None) -> EagleDraftInput | None:
        """Show the drafter the newly accepted tokens with the target's features; the state of the decoding requests."""
        ...

    def propose(self, draft: EagleDraftInput | None, batch: DecodeBatch) -> Candidates:
        """The candidate nodes of each decoding request."""
        ...
