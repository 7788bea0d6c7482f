"""The README's server, used as a user would."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import mean

import httpx
import openai
import pytest

from tests.e2e.conftest import PROMPTS, REPOSITORY, Served

README_BODY = {"prompt": "def fibonacci(n):\n", "max_tokens": 64, "temperature": 0}
METRICS = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
}


def test_readme_request_gives_real_text_accelerated_by_the_head(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json=README_BODY, timeout=60).json()
    assert answer["choices"][0]["text"].strip()
    spoken = answer["metrics"]["speculative_decoding"]
    assert set(spoken) == METRICS
    assert spoken["num_spec_tokens"] == 3
    assert len(spoken["acceptance_histogram"]) == 4
    assert spoken["mean_acceptance_length"] > 1.5
    assert spoken["num_draft_tokens"] == 12 * spoken["num_spec_steps"]


def test_openai_client_streams_what_it_gets_in_one_piece(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    asked = {"model": model, "prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0.8, "seed": 7}
    whole = client.completions.create(**asked)
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_best_of_gives_the_likeliest_of_what_n_would_give(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused")
    asked = {"model": "demo", "prompt": PROMPTS[:2], "max_tokens": 12, "temperature": 1.0, "seed": 3, "echo": True}
    every = client.completions.create(**asked, n=5, logprobs=0)
    best = client.completions.create(**asked, n=2, best_of=5)
    expected = []
    for first in (0, 5):
        ranked = sorted(every.choices[first : first + 5], key=lambda choice: -mean(served_tokens(choice)))
        expected += [choice.text for choice in ranked[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage and every.usage
    assert best.usage.completion_tokens == every.usage.completion_tokens, "all that was generated counts"


def served_tokens(choice: openai.types.CompletionChoice) -> list[float]:
    """The log-probabilities of the output's tokens, without the echoed prompt's."""
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    prompt = next(prompt for prompt in PROMPTS if choice.text.startswith(prompt))
    scored = zip(choice.logprobs.text_offset or [], choice.logprobs.token_logprobs, strict=True)
    return [value for offset, value in scored if offset >= len(prompt)]


@pytest.mark.slow
def test_openai_client_gets_json_of_its_schema(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "minimum": 0}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    asked = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "settings = "}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "settings", "schema": schema}},
        "max_completion_tokens": 120,
        "temperature": 0.7,
        "seed": 3,
    }
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "stop"
    settings = json.loads(answer.choices[0].message.content or "")
    assert settings.keys() == {"name", "size"}
    plain = client.chat.completions.create(**asked, extra_body={"speculative": False})
    assert plain.choices[0].message.content == answer.choices[0].message.content
    asked["response_format"]["json_schema"]["schema"] = {"type": "objec"}
    with pytest.raises(openai.BadRequestError, match="Invalid type"):
        client.chat.completions.create(**asked)


def test_openai_client_chats(served: Served) -> None:
    """The demo has no chat template, so the conversation is written as plain text."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused")
    asked = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "system", "content": "import os"}, {"role": "user", "content": "def area(r):"}],
        "max_completion_tokens": 24,
        "temperature": 0.8,
        "seed": 7,
    }
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content
    text = b"".join(bytes(entry.bytes) for entry in whole.choices[0].logprobs.content)
    assert text.decode().startswith(whole.choices[0].message.content)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    shown = httpx.post(f"{served.url}/tokenize", json={"messages": asked["messages"]}).json()
    assert shown["count"] == whole.usage.prompt_tokens
    text = httpx.post(f"{served.url}/detokenize", json={"tokens": shown["tokens"]}).json()["prompt"]
    assert text == "import os\n\nUser: def area(r):\nAssistant:"
    plain = client.chat.completions.create(**asked, extra_body={"speculative": False})
    assert plain.choices[0].message.content == whole.choices[0].message.content


def test_flushing_drops_cached_prompts(served: Served) -> None:
    asked = {"prompt": PROMPTS[2], "max_tokens": 8}

    def cached() -> int:
        answer = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert httpx.post(f"{served.url}/flush_cache").json()["freed_tokens"] > 0
    assert cached() == 0
    assert httpx.get(f"{served.url}/health_generate").status_code == 200


def test_a_salt_separates_the_cached_prompts_and_changes_no_text(served: Served) -> None:
    asked = {"prompt": PROMPTS[0], "max_tokens": 8, "seed": 5}

    def answered(salt: str | None) -> tuple[str, int]:
        body = {**asked, "cache_salt": salt}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    salts = [None, "a", "b", None, "a", "b"]
    assert httpx.post(f"{served.url}/flush_cache").status_code == 200
    texts, cached = zip(*map(answered, salts), strict=True)
    assert len(set(texts)) == 1
    assert cached[:3] == (0, 0, 0), "what another salt or none has cached is not found"
    assert min(cached[3:]) > 0


@pytest.mark.slow
def test_a_seed_gives_the_same_text_in_any_batch(served: Served) -> None:
    asked = {"prompt": PROMPTS[1], "max_tokens": 32, "temperature": 1.0, "seed": 3}

    def text(_: int) -> str:
        return httpx.post(f"{served.url}/v1/completions", json=asked, timeout=120).json()["choices"][0]["text"]

    alone = text(0)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(text, range(8))) == {alone}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"prompt": 3}', 400),
        (b'{"prompt": "x", "max_tokens": -1}', 400),
        (b'{"prompt": "x", "temperature": "hot"}', 400),
        (b'{"prompt": "x", "model": "gpt-9"}', 404),
        (b'{"prompt": [99999]}', 400),
        pytest.param(b'{"prompt": "' + b"word " * 20000 + b'"}', 400, id="a prompt longer than the context"),
        (b'{"prompt": "x", "presence_penalty": 2.5}', 400),
    ],
)
def test_bad_input_gets_an_openai_error_and_the_server_goes_on(served: Served, body: bytes, status: int) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.mark.slow
def test_500_requests_from_32_streams_with_disconnects_end_without_error_and_with_an_empty_engine(
    served: Served,
) -> None:
    outcome = asyncio.run(_storm(served.url, requests=500, streams=32))
    assert outcome.errors == []
    assert outcome.left > 50
    assert outcome.finished + outcome.left == 500
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        engine = httpx.get(f"{served.url}/v1/server_info").json()["engine"]
        if engine["running"] == engine["waiting"] == 0 and engine["kv_slots_free"] == engine["kv_slots_total"]:
            return
        time.sleep(0.1)
    raise AssertionError(engine)


class _Outcome:
    def __init__(self) -> None:
        self.finished, self.left = 0, 0
        self.errors: list[str] = []


async def _storm(url: str, requests: int, streams: int) -> _Outcome:
    outcome, dice = _Outcome(), random.Random(0)
    waiting = iter(range(requests))

    async def client(http: httpx.AsyncClient) -> None:
        for number in waiting:
            leaves_after = dice.choice([None, None, 0, 1, 2])
            body = {
                "prompt": PROMPTS[number % len(PROMPTS)],
                "max_tokens": dice.randint(1, 24),
                "temperature": dice.choice([0.0, 0.7, 1.0]),
                "stream": True,
            }
            await _one(http, body, leaves_after, outcome)

    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(streams)))
    return outcome


async def _one(http: httpx.AsyncClient, body: dict[str, object], leaves_after: int | None, outcome: _Outcome) -> None:
    seen, done = 0, False
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            outcome.errors.append(f"status {response.status_code}: {await response.aread()!r}")
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {") and "error" in json.loads(line.removeprefix("data: ")):
                outcome.errors.append(line)
            done = done or line == "data: [DONE]"
            seen += line.startswith("data: ")
            if leaves_after is not None and seen > leaves_after:
                outcome.left += 1
                return
    if done:
        outcome.finished += 1
    else:
        outcome.errors.append("a stream ended without [DONE]")


@pytest.mark.parametrize(
    "flags",
    [
        ["--page-size", "zero"],
        ["--model-path", "/no/such/directory"],
        pytest.param(["--speculative-num-draft-tokens", "1"], marks=pytest.mark.slow),
        pytest.param(["--no-such-flag"], marks=pytest.mark.slow),
        pytest.param(["--model-path", str(REPOSITORY / "docs")], marks=pytest.mark.slow),
    ],
)
def test_wrong_flag_or_path_is_one_line_and_exit_status_2(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle_server", "--port", "1", "--log-level", "error", *flags],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
