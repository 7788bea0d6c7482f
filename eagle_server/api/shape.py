"""How an endpoint's answers look. One machinery serves every endpoint that generates; the shape is what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from eagle_server.api.choice import Piece
from eagle_server.api.responses import Metrics, Usage
from eagle_server.api.trees import Tree, trees_of
from eagle_server.request import TokenLogprob
from eagle_server.text.detokenizer import TokenSpelling

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


@dataclass(frozen=True)
class Shown:
    """What a call's answers show beside the text.

    `logprobs` and `prompt_logprobs` are how many alternatives, None for no log-probabilities at all.
    """

    spelling: TokenSpelling
    logprobs: int | None
    prompt_logprobs: int | None
    drafts: bool

    def trees(self, piece: Piece) -> list[Tree] | msgspec.UnsetType:
        """What was drafted, if that is shown."""
        return trees_of(piece.trees, self.spelling) if self.drafts else msgspec.UNSET


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
