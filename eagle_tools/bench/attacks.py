"""python -m eagle_tools.bench.attacks NAME PORT: one client that tries to slow down, stop or mislead a server.

It runs in a process of its own, so that its work does not delay the client that is measured. It prints `ready`, starts
when stdin has a line, and then prints one line per answer. `eagle_tools.bench.hostile` starts and kills it.
"""

from __future__ import annotations

import gzip
import http.client
import ipaddress
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from eagle_tools.bench.bad_clients import (
    END,
    HEADER,
    HOST,
    PATIENCE,
    drop,
    drop_soon,
    endless,
    half_open,
    ignore,
    leave,
    read,
    slow_body,
    tiny_chunks,
)

Body = dict[str, Any]
PROMPT = "def area(radius):\n"
PAUSE = 0.05  # seconds between two requests of a client: floods of small requests are not measured
STRETCH = 1000  # requests of one process; bodies of another process differ
DEPTH = 25  # nested repetitions: each doubles the ways to read a text
PAGE = 900  # prompt tokens; the demo's context is 1024


def post(port: int, content: bytes, path: str = "/v1/completions", **headers: str) -> str:
    """Send one request and read its answer; returns the status, and why the choices ended."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    try:
        connection.request("POST", path, content, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    reasons = sorted({choice["finish_reason"] for choice in answer.get("choices", ())})
    return " ".join([str(response.status), *reasons])


def chat(port: int, content: bytes) -> str:
    """`post` for a chat."""
    return post(port, content, "/v1/chat/completions")


def gzipped(port: int, content: bytes) -> str:
    """`post` of a body that gzip has compressed."""
    return post(port, content, **{"content-encoding": "gzip"})


def text(port: int, content: bytes) -> str:
    """Send a text to /tokenize."""
    return post(port, content, "/tokenize")


def got(path: str) -> Callable[[int, bytes], str]:
    """GET a path, without a key."""

    def act(port: int, _: bytes) -> str:
        connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
        finally:
            connection.close()
        return str(response.status)

    return act


def as_anybody(port: int, content: bytes) -> str:
    """`post` on behalf of a client that nobody has seen before, as it says."""
    return post(port, content, **{"x-forwarded-for": str(ipaddress.ip_address(random.getrandbits(32)))})


def padded(size: int) -> Callable[[int], Body]:
    """Fields that make a body longer and change nothing."""
    return lambda _: {"user": "u" * size}


def new_regex(number: int) -> Body:
    """A regular expression that no other request has, although they all allow the same texts."""
    word = "".join(chr(ord("a") + int(digit)) for digit in f"{number:010}")
    return {"structured_outputs": {"regex": f"[a-z ]{{10}}|{word}"}, "ignore_eos": False}


@dataclass(frozen=True)
class Load:
    """Requests that compete with the measured client: `clients` at a time, each sent again after its answer.

    `baseline` names the load that the effect is compared with; None: this is a baseline. `body` gets a number that no
    other request has. A `fixed` body is built once, before the start, because building it takes long. `server` is a key
    of `hostile.SERVERS`. `neighbour` gives fields of the measured client's requests, the same beside attack and
    baseline; by default these are long enough to be prepared on a thread.
    """

    body: Callable[[int], Body | bytes]
    baseline: str | None
    act: Callable[[int, bytes], str] = post
    clients: int = 1
    fixed: bool = False
    server: str = "default"
    neighbour: Callable[[int], Body] = padded(6000)


def plain(**fields: Any) -> Callable[[int], Body]:
    """A body that runs to max_tokens."""
    return lambda number: {"prompt": PROMPT, "max_tokens": 200, "seed": number, "ignore_eos": True, **fields}


def grammar(kind: str, source: Callable[[int], Any]) -> Callable[[int], Body]:
    """A body with a grammar that no other request has."""
    rest = {"prompt": PROMPT, "max_tokens": 200, "timeout": 2}
    return lambda number: {**rest, "structured_outputs": {kind: source(number)}}


def page(number: int, tokens: int = PAGE, **fields: Any) -> Body:
    """A prompt of token ids that begins like no other."""
    first, second = 7 + number % 4000, 7 + number // 4000 % 4000
    prompt = [first, second, *(7 + (number + i * i) % 4000 for i in range(tokens - 2))]
    return plain(**{"prompt": prompt, "max_tokens": 8, **fields})(number)


def short_pages(number: int) -> Body:
    """Eight prompts that have as many tokens together as one long prompt."""
    return plain(prompt=[page(8 * number + i, PAGE // 8)["prompt"] for i in range(8)], max_tokens=1)(number)


def long_pages(number: int) -> Body:
    return plain(prompt=[page(8 * number + i)["prompt"] for i in range(8)], max_tokens=1)(number)


def spaces(megabytes: int) -> Callable[[int], bytes]:
    """A compressed body with this many MB of spaces after a prompt, in a thousandth of the size."""
    return lambda _: gzip.compress(b'{"prompt": "a", "max_tokens": 1' + b" " * (megabytes << 20) + b"}")


def tools_beside_a_form(number: int) -> Body:
    """100 functions that nobody has offered before, and a form of the answer."""
    schema = wide_schema(number)
    tools = [
        {"type": "function", "function": {"name": f"f{number}_{i}", "parameters": schema, "strict": not i % 12}}
        for i in range(100)
    ]
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    said = [{"role": "user", "content": PROMPT}]
    return {"messages": said, "tools": tools, "response_format": form, "max_tokens": 200, "timeout": 2}


def messages(_: int) -> bytes:
    """400,000 messages."""
    return b'{"messages": [' + b'{"role":"user","content":"a"},' * 400_000 + b'{"role":"user","content":"a"}]}'


def deep_schema(number: int) -> Body:
    schema: Body = {"const": number}
    for level in range(45):
        schema = {"type": "object", "properties": {f"a{level}": schema}, "required": [f"a{level}"]}
    return schema


def wide_schema(number: int) -> Body:
    return {"type": "object", "properties": {f"p{number}_{i}": {"type": ["string", "integer"]} for i in range(60)}}


def large(**fields: str) -> Callable[[int], bytes]:
    """A body of fields that are JSON already."""

    def build(_: int) -> bytes:
        values = {"prompt": json.dumps(PROMPT), "max_tokens": "200", "ignore_eos": "true", **fields}
        return ("{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}").encode()

    return build


def bad_words(*words: str) -> Callable[[int], bytes]:
    """1,024 bad words: `words`, then pairs and triples of the demo's tokens."""
    short = [f"{first}{second}" for first in ("(self", "return ", "def ", "import ") for second in range(1000, 1256)]
    return large(bad_words=json.dumps([*words, *short][:1024]))


def million_names(_: int) -> bytes:
    return ("{" + ",".join(f'"k{i}":1' for i in range(1_000_000)) + "}").encode()


def million_biases(number: int) -> bytes:
    return large(logit_bias="{" + ",".join(f'"{i}":1' for i in range(1_000_000)) + "}")(number)


def chunks(size: int) -> Callable[[int], bytes]:
    """The head of a body in chunks, and a megabyte of them."""
    chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
    return lambda _: HEADER + b"transfer-encoding: chunked" + END + chunk * (2**20 // len(chunk))


def truncated(unit: str, size: int) -> Callable[[int], bytes]:
    """A prompt of this size that is truncated to one token. The tokenizer cannot cut it if its unit has no words."""
    prompt = unit * (size // len(unit.encode()))
    body = {"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": 1}
    return lambda _: json.dumps(body, ensure_ascii=False).encode()


def long_stream(number: int) -> Body:
    return plain(stream=True, max_tokens=900, prompt=f"{number}")(number)


def many_sequences(number: int) -> Body:
    """Most sequences that one request may have."""
    return {"prompt": [f"{number} {letter}" for letter in "abcdefgh"], "n": 111, "max_tokens": 900}


def places(number: int) -> Body:
    """Of some n=64, of most one sequence."""
    return plain(n=1 if number % 6 else 64, max_tokens=900)(number)


def many_properties(number: int) -> Body:
    return {"type": "object", "properties": {f"p{number}_{i}": {"type": "string"} for i in range(1500)}}


def long_prompt(number: int) -> Body:
    """A prompt of 4 MB that is truncated to one token."""
    return {"prompt": f"{number} words" * 350_000, "max_tokens": 1, "truncate_prompt_tokens": 1}


LOADS: dict[str, Load] = {
    # Ordinary requests.
    "nothing": Load(plain(), None, clients=0),
    "plain": Load(plain(timeout=2), None),
    "plain x8": Load(plain(timeout=2), None, clients=8),
    "streams x8": Load(plain(max_tokens=900, logprobs=20, stream=True), None, read, clients=8),
    "n=16": Load(plain(n=16, max_tokens=400), None),
    "n=64 of one long prompt": Load(lambda number: page(0, n=64, max_tokens=16, user=str(number)), None),
    "8 short prompts": Load(short_pages, None),
    "8 long prompts": Load(long_pages, None),
    "n=8, pool half full": Load(plain(n=8, max_tokens=200), None, server="small pool"),
    "nothing, few files": Load(plain(), None, clients=0, server="few files"),
    "nothing, with a key": Load(plain(), None, clients=0, server="key"),
    "nothing, TLS": Load(plain(), None, clients=0, server="TLS, few files"),
    "40 streams": Load(long_stream, None, read, clients=40),
    "40 streams, few files": Load(long_stream, None, read, clients=40, server="few files"),
    "nothing, 20 kB": Load(plain(), None, clients=0, neighbour=padded(20_000)),
    "nothing, 300 kB": Load(plain(), None, clients=0, neighbour=padded(300_000)),
    "60 short prompts": Load(lambda number: {"prompt": f"{number}", "max_tokens": 1}, None, clients=60),
    "nothing, regex": Load(plain(), None, clients=0, neighbour=new_regex),
    # Grammars: slow to match, slow to compile, ambiguous.
    "regex: 25 nested stars": Load(
        grammar("regex", lambda number: f"({number})?" + "(" * DEPTH + "[a-z ]" + "*)" * DEPTH), "plain"
    ),
    "regex: words of words": Load(grammar("regex", lambda number: f"({number})?(([a-z]+ *)+[,.]? *)*"), "plain"),
    "EBNF: e ::= e e e": Load(
        grammar("grammar", lambda number: f'root ::= e | "{number}"\ne ::= "" | [a-z ] | e e e'), "plain"
    ),
    "schema: 5,000 words": Load(
        grammar("json", lambda number: {"enum": [f"w{number}_{i}" for i in range(5000)]}), "plain"
    ),
    "schema: 45 objects deep": Load(grammar("json", deep_schema), "plain"),
    "schema: new, 8 at a time": Load(grammar("json", wide_schema), "plain x8", clients=8),
    # Clients that leave, and clients that do not read.
    "tools beside a form": Load(tools_beside_a_form, "plain x8", chat, clients=8, server="tools"),
    "timeout of 0.1 s, n=8": Load(plain(timeout=0.1, n=8), "plain x8"),
    "leave mid-stream": Load(plain(stream=True, max_tokens=900), "plain x8", leave, clients=8),
    "never read": Load(plain(max_tokens=900, logprobs=20, stream=True), "streams x8", ignore, clients=8),
    "888 sequences, left at once": Load(many_sequences, "40 streams", drop_soon, clients=4),
    # One client that takes what there is: running requests, places of the queue, connections, addresses.
    "60 streams": Load(long_stream, "40 streams", read, clients=60),
    "2,000 sequences": Load(places, "40 streams", clients=120),
    "a new client each time": Load(plain(), "40 streams", as_anybody, clients=64),
    "200 completions, few files": Load(plain(max_tokens=900), "40 streams, few files", clients=200, server="few files"),
    "metrics, 8 at a time": Load(plain(), "nothing, with a key", got("/metrics"), clients=8, server="key"),
    "probes, 50 at a time": Load(plain(), "nothing, with a key", got("/health_generate"), clients=50, server="key"),
    "OpenAPI, 8 at a time": Load(plain(), "nothing, with a key", got("/openapi.json"), clients=8, server="key"),
    # Parameters of extreme size.
    "bad_words: 1,024 of 15 kB": Load(bad_words(*["x" * 15_000] * 1024), "plain", fixed=True),
    "bad_words: one of 100k": Load(bad_words(" x" * 100_000), "plain", fixed=True),
    "bad_words: one of 1,000": Load(bad_words(" x" * 1000), "plain", fixed=True),
    "allowed_token_ids: 120k": Load(large(allowed_token_ids=json.dumps([*range(4, 4000)] * 30)), "plain", fixed=True),
    "stop_token_ids: 2M, n=16": Load(large(stop_token_ids=f"[{'1234,' * 2_000_000}1]", n="16"), "n=16", fixed=True),
    "n=16, 20 logprobs": Load(plain(n=16, max_tokens=400, logprobs=20), "n=16"),
    # Large bodies, which are refused.
    "body: 2.5M token ids": Load(lambda n: large(prompt=f"[{'1234,' * 2_500_000}1]")(n), "nothing", fixed=True),
    "body: 400k messages": Load(messages, "nothing", chat, fixed=True),
    "body: 1M logit_bias": Load(million_biases, "nothing", fixed=True),
    "body: 1M unknown names": Load(million_names, "nothing", fixed=True),
    "body: 4M brackets": Load(lambda n: large(user="[" * 4_000_000)(n), "nothing", fixed=True),
    "body: 15 MB in 15 kB": Load(spaces(15), "nothing", gzipped, clients=8, fixed=True),
    "body: 1 GB in 1 MB": Load(spaces(1024), "nothing", gzipped, clients=8, fixed=True),
    "body: byte by byte": Load(lambda _: HEADER + b"content-length: 1000000\r\n\r\n", "nothing", slow_body),
    "300 half-open": Load(lambda _: HEADER, "nothing, few files", half_open, server="few files"),
    "chunks of 1 byte": Load(chunks(1), "nothing", endless, fixed=True),
    "chunks of 16 bytes": Load(chunks(16), "nothing", endless, fixed=True),
    "chunks of 64 bytes": Load(chunks(64), "nothing", endless, fixed=True),
    "chunks of 1,000 bytes": Load(chunks(1000), "nothing", endless, fixed=True),
    "chunks without a key": Load(chunks(1), "nothing, with a key", endless, fixed=True, server="key"),
    "bodies after a refusal": Load(
        lambda _: HEADER + b"content-length: 9999999999" + END + b" " * 2**20, "nothing", endless, fixed=True
    ),
    "300 TLS handshakes": Load(lambda _: b"\x16\x03\x01", "nothing, TLS", half_open, server="TLS, few files"),
    "4 MB prompts": Load(long_prompt, "nothing", clients=16, fixed=True),
    "4 MB prompts, left": Load(long_prompt, "nothing", drop, clients=8, fixed=True),
    "250 kB prompts": Load(truncated("ab c", 250_000), "60 short prompts", clients=60, fixed=True),
    "250 kB without words": Load(
        truncated("ab_c", 250_000), "nothing, 20 kB", clients=60, fixed=True, neighbour=padded(20_000)
    ),
    "1 MB without words": Load(
        truncated("ab_c", 1_000_000), "nothing, 300 kB", clients=24, fixed=True, neighbour=padded(300_000)
    ),
    "16 MB of emoji": Load(truncated("😀", 16_400_000), "nothing", clients=2, fixed=True),
    "400 times tiny chunks": Load(
        lambda _: HEADER + b"transfer-encoding: chunked" + END,
        "nothing, 300 kB",
        tiny_chunks,
        neighbour=padded(300_000),
    ),
    "schemas of 1,500 names": Load(grammar("json", many_properties), "nothing, regex", clients=24, neighbour=new_regex),
    "tokenize flood": Load(lambda _: {"prompt": " " * 4_000_000}, "nothing", text, clients=24, fixed=True),
    # Prompts.
    "long prompts": Load(page, "8 short prompts"),
    "8 long prompts, scored": Load(lambda number: {**long_pages(number), "prompt_logprobs": 20}, "8 long prompts"),
    "n=64 of a long prompt": Load(lambda number: page(number, n=64, max_tokens=16), "n=64 of one long prompt"),
    "evictions": Load(short_pages, "8 short prompts", server="small pool"),
    "preemptions": Load(plain(n=8, max_tokens=900), "n=8, pool half full", server="small pool"),
}


def main(name: str, port: int, seed: int) -> None:
    """Run a load until this process is killed."""
    load, numbers = LOADS[name], count(seed * STRETCH)
    fixed = _encoded(load.body(0)) if load.fixed else None

    def client() -> None:
        while True:
            content = fixed or _encoded(load.body(next(numbers)))
            try:
                answer = load.act(port, content)
            except (OSError, ValueError, http.client.HTTPException) as error:
                answer = type(error).__name__
            print(answer, flush=True)
            time.sleep(PAUSE)

    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(load.clients):
        threading.Thread(target=client, daemon=True).start()
    threading.Event().wait()


def _encoded(body: Body | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 0)
