"""Who listens to what passes between the API and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eagle_server.request import Deltas, Ready, Request


class Observer(Protocol):
    """Is told of everything in the order in which it happens, on the event loop; should be quick, and not raise."""

    def attached(self, ready: Ready) -> None:
        """An engine process is up."""
        ...

    def detached(self) -> None:
        """It is gone, with all requests in it."""
        ...

    def submitted(self, requests: Sequence[Request]) -> None:
        """These went to the engine together, for the current task."""
        ...

    def dispatched(self, message: Deltas) -> None:
        """A message came, before anybody has seen its deltas."""
        ...

    def completed(self, request_id: str, kept: int) -> None:
        """The first `kept` tokens of a request, up to a stop string, are its answer."""
        ...

    def left(self, requests: Sequence[Request]) -> None:
        """Nobody waits for these any more; those that have not ended are aborted. May come twice."""
        ...


class Unobserved:
    """Nobody listens."""

    def attached(self, ready: Ready) -> None:
        pass

    def detached(self) -> None:
        pass

    def submitted(self, requests: Sequence[Request]) -> None:
        pass

    def dispatched(self, message: Deltas) -> None:
        pass

    def completed(self, request_id: str, kept: int) -> None:
        pass

    def left(self, requests: Sequence[Request]) -> None:
        pass
