"""Limits on the number of values in a JSON text, counted before it is parsed.

A parser builds an object for every value and holds the interpreter lock until the last one, so a body of few megabytes
would stop all streams for seconds. Counting takes a millisecond per megabyte, one chunk at a time.
"""

from __future__ import annotations

MAX_ITEMS = 2**19  # commas: list items and object members; parsing as many numbers takes about 40 ms
MAX_NESTED = 2**16  # lists, objects and keys, which take longer
_CHUNK = 2**16  # bytes
_OPENINGS = (b"[", b"{", b":")


class TooManyValues(ValueError):
    """A JSON text has more values than the limits allow."""


class JsonSize:
    """Counts the values of a JSON text that arrives in chunks. What strings contain does not count."""

    def __init__(self) -> None:
        self._items = self._nested = 0
        self._is_in_string = False
        self._escape = b""  # a backslash at the end of the last chunk, whose character is in the next one

    def add(self, chunk: bytes) -> None:
        """
        Raises:
            TooManyValues: the text has more values than the limits allow.
        """
        text = self._escape + chunk
        backslashes = len(text) - len(text.rstrip(b"\\"))
        self._escape = text[len(text) - backslashes % 2 :]
        if self._is_in_string and b'"' not in text:
            return  # a part of a long string, the most frequent case in large bodies
        # Without escaped quotes, every second piece between quotes is outside of strings.
        text = text[: len(text) - backslashes % 2].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = text.split(b'"')
        outside = b"".join(pieces[self._is_in_string :: 2])
        self._is_in_string ^= len(pieces) % 2 == 0
        self._items += outside.count(b",")
        self._nested += sum(map(outside.count, _OPENINGS))
        if self._items > MAX_ITEMS:
            raise TooManyValues(f"more than {MAX_ITEMS} items in its lists and objects")
        if self._nested > MAX_NESTED:
            raise TooManyValues(f"more than {MAX_NESTED} lists, objects and keys")


def check_size(text: str) -> None:
    """
    Raises:
        TooManyValues: the JSON text has more values than the limits allow.
    """
    size, data = JsonSize(), text.encode()
    for start in range(0, len(data), _CHUNK):
        size.add(data[start : start + _CHUNK])
