"""How an endpoint's answers look. One machinery serves every endpoint that generates; the shape is what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from eagle_server.api.choice import Piece
from eagle_server.api.responses import Metrics, Usage
from eagle_server.request import TokenLogprob

Body = msgspec.Struct


@dataclass(frozen=True)
class Header:
    """What every body of a call repeats."""

    id: str
    created: int
    model: str


@dataclass(frozen=True)
class Totals:
    """What stands at the end of an answer. `metrics` only where there is a single choice."""

    usage: Usage
    metrics: Metrics | msgspec.UnsetType


class Shape(Protocol):
    """Belongs to one call, so it may remember which choices have begun."""

    def answer(
        self, header: Header, choices: Sequence[Piece], prompt_logprobs: Sequence[list[TokenLogprob]], totals: Totals
    ) -> Body:
        """The whole answer: per choice everything it said, and its prompt's scores."""
        ...

    def events(self, header: Header, piece: Piece, usage: Usage | None | msgspec.UnsetType) -> Sequence[Body]:
        """The events of a stream that a piece makes."""
        ...

    def closing(self, header: Header, totals: Totals) -> Body:
        """The event that ends a stream whose caller asked for usage."""
        ...
