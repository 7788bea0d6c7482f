"""Compressed bodies: gzip, deflate and zstd are read, others are refused, and bombs cost no more than the bound."""

from __future__ import annotations

import gzip
import json
import resource
import zlib
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import zstandard

from eagle_server.api.errors import ApiError
from eagle_server.api.guard.body import MAX_BODY_BYTES
from eagle_server.api.guard.content_coding import CODINGS, PIECE, decoder_of
from tests.api.fake_engine import FakeEngine

PATH = "/v1/completions"
BODY = json.dumps({"model": "fake", "prompt": "ab" * 50, "max_tokens": 3}).encode()


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def streamed_zstd(data: bytes) -> bytes:
    """Without its size in the header, as a stream has it."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


ENCODE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip, named in capitals": ("GZip", gzip.compress),
    "gzip, two members": ("x-gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "zstd as a stream": ("zstd", streamed_zstd),
    "identity": ("identity", bytes),
}


async def post(http: httpx.AsyncClient, content: bytes | AsyncIterator[bytes], coding: str) -> httpx.Response:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    return await http.post(PATH, content=content, headers=headers)


@pytest.mark.parametrize("name", ENCODE)
async def test_a_compressed_body_is_read(http: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    coding, encode = ENCODE[name]
    content = encode(BODY)

    async def single_bytes() -> AsyncIterator[bytes]:
        for byte in content:
            yield bytes([byte])

    for sent in (content, single_bytes()):
        answer = await post(http, sent, coding)
        assert answer.status_code == 200, answer.text
        assert bytes(engine.requests[-1].prompt_token_ids).decode() == "ab" * 50


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, gzip", "x-foo", "gzip\x7f"])
async def test_other_codings_are_refused_with_those_that_are_read(http: httpx.AsyncClient, coding: str) -> None:
    answer = await post(http, BODY, coding)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == ", ".join(CODINGS)
    assert "gzip, deflate, zstd" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", [name for name in ENCODE if name != "identity"])
async def test_a_broken_or_cut_body_is_named(http: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    coding, encode = ENCODE[name]
    content = encode(BODY)
    for wrong in (BODY, content[:-1], content[: len(content) // 2], content + b"more", b""):
        answer = await post(http, wrong, coding)
        assert answer.status_code == 400, wrong[:20]
        assert "not valid" in answer.json()["error"]["message"]
    assert not engine.requests


def bombs() -> Iterator[tuple[str, bytes]]:
    """1 GiB of zeros each, in about a megabyte, and in 35 kB."""
    compressor = zlib.compressobj(9, wbits=31)
    yield "gzip", b"".join(compressor.compress(bytes(2**20)) for _ in range(2**10)) + compressor.flush()
    zeros = zstandard.ZstdCompressor(19).compressobj()
    yield "zstd", b"".join(zeros.compress(bytes(2**20)) for _ in range(2**10)) + zeros.flush()


async def test_a_bomb_ends_at_the_bound(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for coding, content in bombs():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer = await post(http, content, coding)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 2**10
        assert answer.status_code == 413, coding
        assert grown < 8 * MAX_BODY_BYTES, f"{coding}: {grown / 2**20:.0f} MiB"
    assert not engine.requests


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_pieces_are_small(coding: str) -> None:
    content = ENCODE[coding][1](bytes(2**25))
    decoder = decoder_of(coding)
    assert decoder is not None
    pieces = list(decoder.decode(content))
    assert sum(map(len, pieces)) == 2**25
    assert max(map(len, pieces)) <= 2**21


@pytest.mark.parametrize("name", [name for name in ENCODE if name != "identity"])
def test_a_body_may_end_anywhere_near_the_end_of_a_piece(name: str) -> None:
    """zlib may have taken all of the input while a full piece leaves the rest of the output inside of it."""
    coding, encode = ENCODE[name]
    for size in range(PIECE - 3, PIECE + 600):
        decoder = decoder_of(coding)
        assert decoder is not None
        assert b"".join(decoder.decode(encode(b"a" * size))) == b"a" * size
        decoder.finish()


def test_random_damage_is_an_error_of_the_client() -> None:
    for coding in CODINGS:
        content = bytearray(ENCODE[coding][1](BODY * 20))
        for place in range(len(content)):
            damaged = bytes(content[:place]) + bytes([content[place] ^ 85]) + bytes(content[place + 1 :])
            decoder = decoder_of(coding)
            assert decoder is not None
            try:
                b"".join(decoder.decode(damaged))
                decoder.finish()
            except ApiError as error:
                assert error.status == 400


async def test_a_byte_order_mark_is_no_part_of_the_body(http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, content=b"\xef\xbb\xbf" + BODY, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
