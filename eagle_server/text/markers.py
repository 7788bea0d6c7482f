"""Markers in a growing text: special tokens among them, beginnings of them, and whitespace around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from eagle_server.text.tokenizer import Tokenizer

WHITESPACE = 64  # most characters that are held back; without a limit each token would scan all of them again


class HasMarkers(Protocol):
    """A format of tool calls or of thinking."""

    @property
    def markers(self) -> tuple[str, ...]: ...


F = TypeVar("F", bound=HasMarkers)


@dataclass(frozen=True)
class Syntax(Generic[F]):
    """The served model's format of tool calls or of thinking. `markers` has its special tokens, by token id."""

    format: F
    markers: Mapping[int, str]

    @classmethod
    def of(cls, format: F, tokenizer: Tokenizer) -> Syntax[F]:
        return cls(format, special_markers(format.markers, tokenizer))

    @property
    def tokens(self) -> Mapping[str, int]:
        """The ids of the markers that are special tokens."""
        return {marker: token for token, marker in self.markers.items()}


def special_markers(markers: Iterable[str], tokenizer: Tokenizer) -> Mapping[int, str]:
    """The markers that are special tokens of this tokenizer, by token id. Decoding leaves special tokens out."""
    ids = {marker: tokenizer.token_id(marker) for marker in markers if marker}
    return {token: marker for marker, token in ids.items() if token is not None and not tokenizer.decode([token])}


def without_leading_space(text: str) -> str | None:
    """The text without its leading whitespace, None if that has more than WHITESPACE characters."""
    rest = text.lstrip()
    return rest if len(text) - len(rest) <= WHITESPACE else None


def overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
