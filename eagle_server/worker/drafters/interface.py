"""What a drafter is: something that ends in a tree of candidate tokens. The cycle knows no drafter by name."""

from __future__ import annotations

from typing import Protocol, TypeVar

from eagle_server.speculation.tree import Candidates
from eagle_server.worker.batch import DecodeBatch, ExtendBatch

State = TypeVar("State")


class Drafter(Protocol[State]):
    """`State` is the drafter's own affair. `feeds`: it must see every accepted token with the target's feature."""

    feeds: bool

    def extend(self, work: ExtendBatch | None, batch: DecodeBatch | None) -> State:
        """Show the drafter the newly accepted tokens with the target's features; the state of the decoding requests."""
        ...

    def propose(self, draft: State, batch: DecodeBatch) -> Candidates:
        """The candidate nodes of each decoding request."""
        ...
