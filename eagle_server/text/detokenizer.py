"""Tokens to text, one token at a time: never half a character, never a character of a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle_server.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

# Prompt tokens decoded ahead of the first output token: without them many decoders drop its leading space.
CONTEXT_TOKENS = 6
# A character has at most 4 bytes, so a tail that is still broken after more tokens than this stays broken.
MAX_HELD_TOKENS = 8
# Where nothing but broken bytes comes, the window is cut here.
MAX_WINDOW_TOKENS = 64


class IncrementalDetokenizer:
    """Text of a growing token sequence.

    `_window` holds the newest tokens. Its first `_settled` ones are context whose text is out already; they are kept
    because what a token decodes to depends on its left neighbour. `_emitted` characters of the window's text are out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), shown: Mapping[int, str] | None = None
    ) -> None:
        """`shown` are special tokens that have text nonetheless."""
        self._tokenizer = tokenizer
        self._shown = shown or {}
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._settled = 0
        self._emitted = 0
        self._settle()

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        if token_id in self._shown:
            return self.flush() + self._shown[token_id]
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        end = self._stable_length(text)
        fresh = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if (fresh and end == len(text)) or len(self._window) >= MAX_WINDOW_TOKENS:
            del self._window[: self._settled]
            self._settle()
        return fresh

    def flush(self) -> str:
        """The text that was held back, an incomplete character as U+FFFD."""
        fresh = self._tokenizer.decode(self._window)[self._emitted :]
        self._settle()
        return fresh

    def _settle(self) -> None:
        self._settled = len(self._window)
        self._emitted = len(self._tokenizer.decode(self._window))

    def _stable_length(self, text: str) -> int:
        """Characters at the start of the window's text that no later token can change."""
        if not text.endswith(REPLACEMENT) or len(self._window) >= MAX_WINDOW_TOKENS:
            return len(text)
        if len(self._window) - self._settled <= MAX_HELD_TOKENS:
            return len(text.rstrip(REPLACEMENT))
        return len(text) - 1


class StopStrings:
    """Passes text on up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text so far that is certain not to belong to a stop string; nothing once one was found."""
        if self.found:
            return ""
        text = self._held + text
        cuts = [cut for stop in self._stops if (cut := text.find(stop)) >= 0]
        if cuts:
            self.found = True
            self._held = ""
            return text[: min(cuts)]
        kept = self._prefix_length(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """The text that was held back."""
        text, self._held = self._held, ""
        return text

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TokenSpelling:
    """How single tokens are shown beside their log-probabilities.

    A token is shown as its text; one that is only a part of a character as `bytes:\\xf0\\x9f`, as OpenAI does, so that
    different tokens stay different; one without text (special tokens) in the vocabulary's spelling.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # Decoders may drop the space before the first token, so every token is decoded behind this one.
        self._anchor = tokenizer.encode("a", special=False)[-1:]
        self._anchor_length = len(tokenizer.decode(self._anchor))
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> str:
        return self._spelled(token_id)[0]

    def raw(self, token_id: int) -> bytes:
        """What the token stands for, also where it is only a part of a character."""
        return self._spelled(token_id)[1]

    def _spelled(self, token_id: int) -> tuple[str, bytes]:
        spelled = self._known.get(token_id)
        if spelled is None:
            spelled = self._known[token_id] = self._spell(token_id)
        return spelled

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        text = self.tokenizer.decode([*self._anchor, token_id])[self._anchor_length :]
        piece = self.tokenizer.piece(token_id)
        if piece is None or (text and REPLACEMENT not in text):
            return text, text.encode()
        raw = _piece_bytes(piece) if text else None
        if raw is None:
            return piece, piece.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _piece_bytes(piece: str) -> bytes | None:
    """Bytes that a vocabulary entry stands for, in SentencePiece's (<0xF0>) or in byte-level spelling."""
    if len(piece) == len("<0xF0>") and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others as U+0100, U+0101, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
