"""What a chat prints: answers, coloured by the origin of their tokens, and notes about them."""

from __future__ import annotations

import sys
import unicodedata

from rich.console import Console
from rich.text import Text

from eagle_tools.chat.answer import Origin, Piece, StreamedAnswer

COLOURS = {Origin.DRAFT: "green", Origin.TARGET: "yellow"}
QUIET, FAILED = "dim", "red"
_SHOWN = "\n\t"  # control characters that only move the cursor forward


class Screen:
    """Answers go to stdout; notes go to stderr, and only if stdout is a terminal: a pipe gets the answer alone."""

    def __init__(self, *, colors: bool) -> None:
        self.colors = colors
        self._out = Console(file=sys.stdout, highlight=False)
        self._notes = Console(file=sys.stderr, highlight=False)
        self._at_line_start = True

    @property
    def is_terminal(self) -> bool:
        return self._out.is_terminal

    def show(self, piece: Piece) -> None:
        """Print a piece of an answer. Thinking is dim; a pipe does not get it."""
        if piece.is_reasoning and not self.is_terminal:
            return
        colour = COLOURS[piece.origin] if self.colors and piece.origin is not None else ""
        style = f"{QUIET if piece.is_reasoning else ''} {colour}".strip()
        text = harmless(piece.text) if self.is_terminal else piece.text
        self._out.out(text, style=style or None, end="", highlight=False)
        self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """Go to the beginning of a line."""
        if not self._at_line_start:
            self._out.out("", highlight=False)
        self._at_line_start = True

    def note(self, text: str) -> None:
        if self.is_terminal:
            self.warn(text)

    def warn(self, text: str) -> None:
        """A note that is said in every case."""
        self._notes.out(harmless(text), style=QUIET, highlight=False)

    def fail(self, text: str) -> None:
        self.end_line()
        self._notes.out(harmless(text), style=FAILED, highlight=False)

    def conclude(self, answer: StreamedAnswer) -> None:
        """The last line: tokens, their speed, tokens per cycle, and what the colours mean."""
        if not self.is_terminal:
            return
        words = [f"{answer.tokens} token{'' if answer.tokens == 1 else 's'}"] if answer.tokens else []
        if answer.speed is not None:
            words.append(f"{answer.speed:.0f} tokens/s")
        if answer.tokens_per_cycle is not None:
            words.append(f"{answer.tokens_per_cycle:.2f} tokens per cycle")
        if answer.finish_reason == "length":
            words.append("cut at the limit of tokens")
        self._notes.out(f"[{', '.join(words)}]", style=QUIET, end="", highlight=False)
        if self.colors and answer.tokens_per_cycle is not None:
            for origin, name in ((Origin.DRAFT, "drafted"), (Origin.TARGET, "the target's own")):
                self._notes.out(f"  {name}", style=COLOURS[origin], end="", highlight=False)
        self._notes.out("", highlight=False)

    def waiting(self, words: str) -> WaitingLine:
        """A line that shows what is waited for, in a terminal."""
        return WaitingLine(self._notes, words)


class WaitingLine:
    """A spinner with words that may change. It shows nothing if stderr is not a terminal."""

    def __init__(self, console: Console, words: str) -> None:
        self._width = console.width - 4  # beside the spinner
        self._status = console.status(Text(words)) if console.is_terminal else None

    def __enter__(self) -> WaitingLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, words: str) -> None:
        if self._status is not None:
            self._status.update(Text(harmless(words)[: self._width]))


def harmless(text: str) -> str:
    """`text` with control characters escaped: a model could write sequences that change the terminal."""
    return "".join(
        character if character in _SHOWN or unicodedata.category(character) != "Cc" else f"\\x{ord(character):02x}"
        for character in text
    )
