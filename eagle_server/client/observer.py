"""The events of the engine client, for metrics and logs."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_server.request import Deltas, Ready, Request


class Observer:
    """Base class of observers; it ignores all events.

    The methods are called on the event loop, in the order of the events. They should be fast and not raise.
    """

    def attached(self, ready: Ready) -> None:
        """An engine process is up."""

    def detached(self) -> None:
        """The engine process is gone, with all its requests."""

    def submitted(self, requests: Sequence[Request]) -> None:
        """The current task sent these requests to the engine together."""

    def dispatched(self, message: Deltas) -> None:
        """A message arrived. Its deltas have not been passed on yet."""

    def completed(self, request_id: str, kept: int) -> None:
        """The first `kept` tokens of a request, up to a stop string, are its answer."""

    def left(self, requests: Sequence[Request]) -> None:
        """No task waits for these requests any more. Those still running are aborted. May be called twice."""
