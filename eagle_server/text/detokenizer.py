"""Tokens to text, one token at a time, without incomplete characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle_server.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

# Prompt tokens decoded before the first output token. Without them many decoders drop its leading space.
CONTEXT_TOKENS = 6
# A character has at most 4 bytes. Text that is still incomplete after more tokens than this is invalid UTF-8.
MAX_HELD_TOKENS = 8
# The window never has more tokens than this, even if all of them are invalid UTF-8.
MAX_WINDOW_TOKENS = 64


class IncrementalDetokenizer:
    """Text of a growing token sequence.

    `_window` holds the newest tokens. The text of its first `_settled` tokens has been returned already. They stay as
    context, because the text of a token depends on the token before it. `_emitted` counts the characters of the
    window's text that have been returned.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), visible: Mapping[int, str] | None = None
    ) -> None:
        """`visible` are special tokens whose text must be part of the output."""
        self._tokenizer = tokenizer
        self._visible = visible or {}
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._settled = 0
        self._emitted = 0
        self._settle()

    def push(self, token_id: int) -> str:
        """The text that `token_id` adds. It is empty while a character is incomplete."""
        if token_id in self._visible:
            return self.flush() + self._visible[token_id]
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        end = self._stable_length(text)
        new = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if (new and end == len(text)) or len(self._window) >= MAX_WINDOW_TOKENS:
            del self._window[: self._settled]
            self._settle()
        return new

    def flush(self) -> str:
        """The text that was held back. An incomplete character becomes U+FFFD."""
        new = self._tokenizer.decode(self._window)[self._emitted :]
        self._settle()
        return new

    def _settle(self) -> None:
        self._settled = len(self._window)
        self._emitted = len(self._tokenizer.decode(self._window))

    def _stable_length(self, text: str) -> int:
        """Length of the part of the window's text that no later token can change."""
        if not text.endswith(REPLACEMENT) or len(self._window) >= MAX_WINDOW_TOKENS:
            return len(text)
        if len(self._window) - self._settled <= MAX_HELD_TOKENS:
            return len(text.rstrip(REPLACEMENT))
        return len(text) - 1
