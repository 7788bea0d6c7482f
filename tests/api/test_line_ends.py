"""Events and log lines are lines for the line splitters of all languages: they have no line end but the line feed."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_server.api.connection import event
from eagle_server.engine.logs import HumanLines, JsonLines

ENDS = "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # what str.splitlines, httpx, JavaScript, Java or .NET split at
# Characters whose UTF-8 is similar, and those that JSON escapes.
NEAR = "\u2027\u2030\u20a8\u00a8\u0084\u0086\u00c2\u00e2\u0428\n\\\"u'\U00010085"
TEXTS = st.text(alphabet=st.one_of(st.sampled_from(ENDS + NEAR), st.characters(exclude_categories=["Cs"])))


class Piece(msgspec.Struct):
    text: str
    others: list[dict[str, str]]


def data_of(encoded: bytes) -> bytes:
    return encoded.removeprefix(b"event: name\n").removeprefix(b"data: ").removesuffix(b"\n\n")


@given(TEXTS, st.lists(st.dictionaries(TEXTS, TEXTS)), st.sampled_from([None, "name"]))
def test_an_event_is_split_at_line_feeds_alone_and_keeps_its_values(
    text: str, others: list[dict[str, str]], name: str | None
) -> None:
    piece = Piece(text, others)
    for data in (piece, msgspec.json.encode(piece)):
        encoded = event(data, name)
        assert encoded.decode().splitlines() == encoded.decode().split("\n")[:-1]
        assert not set(encoded.decode()) & set(ENDS)
        assert json.loads(data_of(encoded)) == {"text": text, "others": others}


@pytest.mark.parametrize("text", ["plain", "é 漢字 “quoted” ’"])
def test_other_events_are_as_msgspec_encodes_them(text: str) -> None:
    piece = Piece(text, [])
    assert event(piece) == b"data: " + msgspec.json.encode(piece) + b"\n\n"


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": f"a{ENDS}b"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": f"a{ENDS}b"}]},
    "/v1/responses": {"input": f"a{ENDS}b"},
    "/v1/messages": {"messages": [{"role": "user", "content": f"a{ENDS}b"}]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_has_no_other_line_ends(http: httpx.AsyncClient, path: str) -> None:
    size = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = await http.post(path, json={**BODIES[path], size: 60, "stream": True})
    assert response.status_code == 200, response.text
    lines = response.text.split("\n")
    assert response.text.splitlines() == lines[:-1]
    values = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    shown = "".join(
        (choice.get("text") or choice.get("delta", {}).get("content") or "")
        for value in values
        for choice in value.get("choices", [])
    )
    deltas = [value["delta"] for value in values if "delta" in value]
    shown += "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)
    assert f"a{ENDS}b" in shown


@given(TEXTS)
def test_a_log_line_is_split_at_line_feeds_alone(text: str) -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "", 1, "x %s", (text,), None)
    for formatter in (HumanLines(dict), HumanLines(lambda: {"key": text}, whole=True)):
        line = formatter.format(record)
        assert f"{line}.".splitlines() == f"{line}.".split("\n")
    line = JsonLines(lambda: {"key": text}).format(record)
    assert len(f"{line}.".splitlines()) == 1
    assert (json.loads(line)["message"], json.loads(line)["key"]) == (f"x {text}", text)


def test_line_ends_in_a_log_line_are_escaped_as_by_repr() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "", 1, "x %s\n  y é", (ENDS,), None)
    assert HumanLines(dict).format(record).endswith(f"WARNING: x {repr(ENDS)[1:-1]}\n  y é")
