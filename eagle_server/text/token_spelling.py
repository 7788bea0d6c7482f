"""The spelling of single tokens in responses."""

from __future__ import annotations

from eagle_server.text.detokenizer import REPLACEMENT
from eagle_server.text.tokenizer import Tokenizer


class TokenSpelling:
    """Spells single tokens, for log-probabilities and draft trees.

    A token is spelled as its text. A token that is only a part of a character is spelled `bytes:\\xf0\\x9f`, as in
    OpenAI's API, so that different tokens have different spellings. A special token has the vocabulary's spelling.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # Decoders may drop the space before the first token, so every token is decoded after this one.
        self._anchor = tokenizer.encode("a", special=False)[-1:]
        self._anchor_length = len(tokenizer.decode(self._anchor))
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> str:
        return self._spelled(token_id)[0]

    def raw(self, token_id: int) -> bytes:
        """The token's bytes, which may be only a part of a character."""
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
    """The bytes of a vocabulary entry, in SentencePiece's (<0xF0>) or in byte-level spelling."""
    if len(piece) == len("<0xF0>") and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return None


def byte_alphabet() -> dict[str, int]:
    """The byte of each character of GPT-2's spelling: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()
