"""An answer as its stream brings it: pieces of text, each with its origin, and the numbers of its cycles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

COMPLETION_TOKENS = 128  # of an answer without a chat template, unless max_tokens is set: base models seldom end
Event = Mapping[str, Any]  # of a stream of /v1/completions or /v1/chat/completions


class Origin(Enum):
    """Where a token comes from: a draft that the target accepted, or the target itself."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass
class Piece:
    """A part of an answer's text. origin: None if the stream does not say it."""

    text: str
    origin: Origin | None
    is_reasoning: bool


class StreamedAnswer:
    """Takes the events of one choice. Without trees in them no origin is known, and this process measures the time.

    `has_trees`: the request asks for them, so text before the first one is the token of the prompt's pass.
    """

    def __init__(self, *, has_trees: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.tokens = 0
        self._clock = clock
        self._first: float | None = None  # when the first text came
        self._last = 0.0
        self._cycles = self._decoded = 0
        self._engine_seconds = 0.0
        self._begun = False
        self._before = Origin.TARGET if has_trees else None  # the origin of text before the first tree

    def take(self, event: Event) -> Iterator[Piece]:
        """The new pieces of an event."""
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for choice in event["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            reasoning = Piece(delta.get("reasoning_content") or "", None, is_reasoning=True)
            content = Piece(choice.get("text") or delta.get("content") or "", None, is_reasoning=False)
            self.text += content.text
            if reasoning.text or content.text:
                self._last = self._clock()
                self._first = self._last if self._first is None else self._first
            yield from self._cut([reasoning, content], choice.get("trees") or [])

    @property
    def speed(self) -> float | None:
        """Tokens per second after the first one, by the engine's clock if the stream has its times."""
        if self._cycles:
            return self._decoded / self._engine_seconds if self._engine_seconds > 0 else None
        seconds = self._last - (self._last if self._first is None else self._first)
        return (self.tokens - 1) / seconds if seconds > 0 and self.tokens > 1 else None

    @property
    def tokens_per_cycle(self) -> float | None:
        """Tokens per forward pass of the target after the first one."""
        return self._decoded / self._cycles if self._cycles else None

    def _cut(self, parts: list[Piece], trees: list[Mapping[str, Any]]) -> Iterator[Piece]:
        """Cut the tokens of `trees` off the parts in their order."""
        if not trees and not self._cycles:
            for part in parts:
                part.origin = self._before
                self._begun = self._begun or bool(part.text)
        if trees and not self._begun:  # the first token comes from the prompt's pass; it is the root of the first tree
            yield from _token(parts, trees[0]["tokens"][0], Origin.TARGET)
            self._begun = True
        for tree in trees:
            self._cycles += 1
            self._decoded += len(tree["accepted"]) + (tree["bonus"] is not None)
            self._engine_seconds = tree["seconds"]
            for node in tree["accepted"]:
                yield from _token(parts, tree["tokens"][node], Origin.DRAFT)
            if tree["bonus"] is not None:
                yield from _token(parts, tree["bonus"], Origin.TARGET)
        # Text without the spelling of a token: characters of several tokens, and text that was held back.
        yield from (part for part in parts if part.text)


def _token(parts: list[Piece], spelling: str, origin: Origin) -> Iterator[Piece]:
    """Cut a token off the first part with text, if that begins with the token's spelling."""
    part = next((part for part in parts if part.text), None)
    if part is not None and spelling and part.text.startswith(spelling):
        part.text = part.text[len(spelling) :]
        yield Piece(spelling, origin, part.is_reasoning)
