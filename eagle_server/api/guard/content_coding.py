"""Decodes compressed bodies piece by piece, so that one which expands to gigabytes costs no more than the bound."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Protocol

import zstandard

from eagle_server.api.errors import ApiError, bad_request

CODINGS = ("gzip", "deflate", "zstd")
PIECE = 2**16  # bytes of a decoded piece, at most; with zstd of most pieces
_ZSTD_SLICE = 64  # bytes of input: they decode to 2 MB at most, 16 blocks of 128 KiB
_WINDOW = 2**23  # bytes of zstd's window, which is memory; RFC 8878 asks for 8 MB


class Decoder(Protocol):
    """Decodes one body."""

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """The next pieces.

        Raises:
            ApiError: the bytes are not of this coding.
        """
        ...

    def finish(self) -> None:
        """
        Raises:
            ApiError: the end is missing.
        """
        ...


class _Zlib:
    """gzip, with any number of members, and deflate, with the header of zlib or, as some clients send it, without."""

    def __init__(self, name: str) -> None:
        self._name, self._make = name, _MAKERS[name]
        self._decoder: Any = None

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        more = bool(chunk)
        while more:
            if self._decoder is None:
                self._decoder = self._make(chunk)
            try:
                piece = self._decoder.decompress(chunk, PIECE)
            except zlib.error:
                raise _broken(self._name) from None
            yield piece
            chunk = self._decoder.unconsumed_tail
            if self._decoder.eof:
                chunk = self._decoder.unused_data
                if self._name != "gzip" and chunk:
                    raise _broken(self._name)
                self._decoder = None if self._name == "gzip" and chunk else self._decoder
            more = bool(chunk) or len(piece) == PIECE  # a full piece: zlib may hold the rest, with all input taken

    def finish(self) -> None:
        if self._decoder is None or not self._decoder.eof:
            raise _broken(self._name, "it is cut")


def _gzip(_: bytes) -> Any:
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def _deflate(first: bytes) -> Any:
    has_header = first[0] & 15 == 8 and (len(first) < 2 or int.from_bytes(first[:2]) % 31 == 0)  # noqa: PLR2004  RFC 1950
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


_MAKERS: dict[str, Callable[[bytes], Any]] = {"gzip": _gzip, "deflate": _deflate}


class _Zstd:
    """Zstandard, one frame. The library decodes all of its input at once, so it gets little at a time."""

    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        for start in range(0, len(chunk), _ZSTD_SLICE):
            if self._decoder.eof:
                raise _broken("zstd")
            try:
                yield self._decoder.decompress(chunk[start : start + _ZSTD_SLICE])
            except zstandard.ZstdError:
                raise _broken("zstd") from None
        if self._decoder.unused_data:
            raise _broken("zstd")

    def finish(self) -> None:
        if not self._decoder.eof:
            raise _broken("zstd", "it is cut")


def decoder_of(content_encoding: str) -> Decoder | None:
    """The decoder for a request's header; None: the body is as it is.

    Raises:
        ApiError: status 415, another coding, or several.
    """
    name = content_encoding.strip().lower().removeprefix("x-")
    if name in ("", "identity"):
        return None
    if name == "zstd":
        return _Zstd()
    if name in _MAKERS:
        return _Zlib(name)
    supported = ", ".join(CODINGS)
    message = f"content-encoding {content_encoding[:40]!r} is not supported; one of {supported} is, or none"
    headers = {"accept-encoding": supported}
    raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_content_encoding", headers=headers)


def _broken(name: str, why: str = "it is broken") -> ApiError:
    return bad_request(f"the body is not valid {name}: {why}", code="invalid_body")
