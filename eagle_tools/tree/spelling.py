"""Token text in which every character is visible."""

from __future__ import annotations

import unicodedata

SPACE = "\u2423"  # an open box
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", " ": SPACE}


def visible(text: str, longest: int | None = None) -> str:
    """`text` with spaces as open boxes and invisible characters escaped, cut after `longest` characters."""
    shown = [_NAMED.get(character) or _seen(character) for character in text]
    whole = "".join(shown)
    if longest is None or len(whole) <= longest:
        return whole
    return whole[: longest - 1] + "\u2026"


def _seen(character: str) -> str:
    hidden = unicodedata.category(character)[0] in "CZ" or unicodedata.combining(character)
    return f"\\u{ord(character):04x}" if hidden else character
