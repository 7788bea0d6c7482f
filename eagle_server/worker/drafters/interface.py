"""What a drafter is: something that ends in a tree of candidate tokens. The cycle knows no drafter by name."""

from __future__ import annotations

from typing import Protocol, TypeVar

from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import EagleVerifyInput, Proposal
from eagle_server.worker.batch import DecodeBatch, Prompts

State = TypeVar("State")


class Drafter(Protocol[State]):
    """`State` is the drafter's own affair. `feeds`: it must see every token with the target's feature before it."""

    feeds: bool

    def forget(self, row: int) -> None:
        """The request in this row of req_to_token has ended, or was preempted."""
        ...

    def prefill(self, prompts: Prompts) -> None:
        """Show the drafter pieces of prompts."""
        ...

    def extend(self, batch: DecodeBatch) -> State:
        """Show the drafter the newly accepted tokens, which are in `batch.accepted_tokens`; the state of the
        requests."""
        ...

    def propose(self, draft: State, batch: DecodeBatch) -> Proposal:
        """The candidate nodes of each decoding request, of those that `batch.token_mask` lets follow."""
        ...

    def observe(self, batch: DecodeBatch, tree: EagleVerifyInput, accepted: Accepted) -> None:
        """What became of the candidates proposed last; on the device still."""
        ...


class ModelDrafter(Drafter[State], Protocol[State]):
    """A drafter whose proposals have scores, and are `num_steps` deep at most."""

    num_steps: int
