"""Responses of /v1/completions, over a fake engine that repeats the prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from eagle_server.request import Request
from tests.api.calls import complete, stream, text_of
from tests.api.fake_engine import EOS, ID, PLAIN, FakeEngine
from tests.api.test_metrics import scrape


async def test_a_completion_has_openais_shape(http: httpx.AsyncClient) -> None:
    answer = await complete(http, model="fake", prompt="abc", max_tokens=7, seed=3)
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    metrics = answer.pop("metrics")["speculative_decoding"]
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "abcabca", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 7,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": metrics["num_accepted_draft_tokens"],
                "rejected_prediction_tokens": metrics["num_draft_tokens"] - metrics["num_accepted_draft_tokens"],
            },
        },
    }
    assert set(metrics) == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "num_spec_tokens",
    }


async def test_metrics_follow_from_the_histogram(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="abc", max_tokens=40, seed=0)
    m = answer["metrics"]["speculative_decoding"]
    histogram = m["acceptance_histogram"]
    assert m["num_spec_tokens"] == 3 == len(histogram) - 1
    assert m["num_spec_steps"] == sum(histogram)
    assert m["num_accepted_draft_tokens"] == sum(i * c for i, c in enumerate(histogram)) > 0
    assert m["num_draft_tokens"] == 12 * m["num_spec_steps"]
    assert m["mean_acceptance_length"] == 1 + m["num_accepted_draft_tokens"] / m["num_spec_steps"]
    assert m["draft_acceptance_rate"] == m["num_accepted_draft_tokens"] / m["num_draft_tokens"]


async def test_metrics_are_null_where_nothing_was_speculated(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt=f"{PLAIN}abc", max_tokens=4)
    assert answer["metrics"] == {"speculative_decoding": None}
    assert predicted(answer) == (0, 0)


def predicted(answer: dict[str, Any]) -> tuple[int, int]:
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("stop", [[], ["cab"]])
@pytest.mark.parametrize("streamed", [False, True])
async def test_drafted_tokens_of_all_choices_are_counted_as_in_the_metrics(
    http: httpx.AsyncClient, stop: list[str], *, streamed: bool
) -> None:
    body = {"prompt": ["abc", f"{PLAIN}abc"], "n": 3, "max_tokens": 9, "seed": 1, "stop": stop}
    if streamed:
        answer = (await stream(http, **body, stream_options={"include_usage": True}))[-1]
    else:
        answer = await complete(http, **body)
    accepted, rejected = predicted(answer)
    found = await scrape(http)
    assert accepted == found["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert accepted + rejected == found["vllm:spec_decode_num_draft_tokens_total"] > accepted


async def test_a_stream_says_the_same_as_an_answer(http: httpx.AsyncClient) -> None:
    body = {"prompt": "héllo 😀 wörld", "max_tokens": 50, "seed": 1, "logprobs": 2}
    answer = await complete(http, **body)
    events = await stream(http, **body, stream_options={"include_usage": True})
    assert text_of(events) == answer["choices"][0]["text"]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [x for e in events for c in e["choices"] for x in c["logprobs"][field]]
        assert streamed == answer["choices"][0]["logprobs"][field]
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == "length"
    assert all(c["finish_reason"] is None for e in events[:-2] for c in e["choices"])
    assert [e["usage"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    assert events[-1]["metrics"] == answer["metrics"]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1


async def test_a_plain_stream_has_neither_usage_nor_metrics(http: httpx.AsyncClient) -> None:
    events = await stream(http, prompt="abc", max_tokens=9)
    assert all("usage" not in e and "metrics" not in e and e["choices"] for e in events)


async def test_usage_can_be_on_every_event(http: httpx.AsyncClient) -> None:
    events = await stream(http, prompt="abc", max_tokens=9, stream_options={"continuous_usage_stats": True})
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts)
    assert counts[-1] == 9


async def test_streamed_characters_are_whole(http: httpx.AsyncClient) -> None:
    events = await stream(http, prompt="😀é日", max_tokens=9 * 3, seed=0)
    assert text_of(events) == "😀é日" * 3
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)


async def test_an_unfinished_character_is_shown_as_such(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="😀", max_tokens=6)
    assert answer["choices"][0]["text"] == "😀\ufffd"


@pytest.mark.parametrize("seed", range(4))
async def test_a_stop_string_ends_text_usage_and_request(
    http: httpx.AsyncClient, engine: FakeEngine, seed: int
) -> None:
    answer = await complete(http, prompt="one STOP two ", max_tokens=500, stop="STOP", seed=seed)
    choice = {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop", "stop_reason": "STOP"}
    assert answer["choices"][0] == choice
    # The tokens of the stop string count as generated; later tokens of the same cycle do not.
    assert answer["usage"]["completion_tokens"] == len("one STOP")
    assert engine.aborted == [engine.requests[0].request_id]
    assert answer["metrics"]["speculative_decoding"] is not None or seed == 3
    events = await stream(http, prompt="one STOP two ", max_tokens=500, stop=["xx", "STOP"], seed=seed)
    assert text_of(events) == "one "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_no_part_of_a_stop_string_is_ever_streamed(http: httpx.AsyncClient) -> None:
    events = await stream(http, prompt="aaab", max_tokens=40, stop=["aab"], seed=0)
    assert text_of(events) == "a"
    events = await stream(http, prompt="aaac", max_tokens=8, stop=["aab"], seed=0)
    assert text_of(events) == "aaacaaac"


async def test_stop_strings_wait_for_min_tokens(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="abc", max_tokens=20, min_tokens=5, stop="c")
    assert answer["choices"][0]["text"] == "abcab"
    assert answer["usage"]["completion_tokens"] == 6


async def test_eos_ends_without_text(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt=f"ab{EOS}cd", max_tokens=20)
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3
    answer = await complete(http, prompt=f"ab{EOS}cd", max_tokens=10, ignore_eos=True)
    assert answer["choices"][0]["text"] == "abcdabcd"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stop_token_ends_without_its_text(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt="abcd", max_tokens=20, stop_token_ids=[ord("c")])
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 3


async def test_held_back_text_comes_out_at_the_end(http: httpx.AsyncClient) -> None:
    events = await stream(http, prompt="abcS", max_tokens=4, stop="STOP")
    assert text_of(events) == "abcS"


@pytest.mark.parametrize(
    ("prompt", "count"), [("abc", 1), (["abc", "de"], 2), ([97, 98], 1), ([[97, 98], [99]], 2), (["abc"], 1)]
)
async def test_prompts_come_in_four_shapes(http: httpx.AsyncClient, prompt: Any, count: int) -> None:
    answer = await complete(http, prompt=prompt, max_tokens=4)
    assert [c["index"] for c in answer["choices"]] == list(range(count))
    assert answer["choices"][0]["text"][:2] == "ab"
    assert ("metrics" in answer) == (count == 1)


async def test_choices_come_in_openais_order(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": ["abc", "de"], "n": 3, "max_tokens": 6, "seed": 5}
    answer = await complete(http, **body)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        *((i, "abcabc") for i in range(3)),
        *((i, "dedede") for i in range(3, 6)),
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert [r.choice for r in engine.requests] == [0, 1, 2, 0, 1, 2]
    assert {r.sampling.seed for r in engine.requests} == {5}
    events = await stream(http, **body)
    assert [text_of(events, i) for i in range(6)] == [c["text"] for c in answer["choices"]]


async def test_a_stop_string_ends_only_its_own_choice(http: httpx.AsyncClient) -> None:
    answer = await complete(http, prompt=["ab.", "cde"], max_tokens=6, stop=".")
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("ab", "stop"), ("cdecde", "length")]


async def request_for(http: httpx.AsyncClient, engine: FakeEngine, **body: Any) -> Request:
    await complete(http, **{"prompt": "abc", **body})
    return engine.requests[-1]


async def test_equal_prompts_of_one_call_have_their_own_noise_unless_a_seed_is_given(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await complete(http, prompt=["abc", "abc"], n=2)
    assert [each.choice for each in engine.requests[-4:]] == [0, 1, 2, 3]
    await complete(http, prompt=["abc", "abc"], n=2, seed=5)
    assert [each.choice for each in engine.requests[-4:]] == [0, 1, 0, 1]


async def test_parameters_reach_the_engine(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    default = (await request_for(http, engine)).sampling
    assert (default.max_tokens, default.temperature, default.top_p, default.top_k) == (16, 1.0, 1.0, 0)
    assert default.logprobs is None
    assert default.seed != (await request_for(http, engine)).sampling.seed
    given = (
        await request_for(
            http,
            engine,
            max_tokens=5,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=42,
            ignore_eos=True,
            stop_token_ids=[1, 2],
            logprobs=0,
        )
    ).sampling
    assert (given.max_tokens, given.min_tokens, given.temperature, given.top_p, given.top_k) == (5, 2, 0.5, 0.9, 7)
    assert (given.seed, given.ignore_eos, given.stop_token_ids, given.logprobs) == (42, True, (1, 2), 0)
    assert (await request_for(http, engine, top_k=-1)).sampling.top_k == 0
    assert (await request_for(http, engine, temperature=1e-9)).sampling.temperature == 0
    assert (await request_for(http, engine, seed=-1)).sampling.seed == -1


async def test_null_and_neutral_parameters_ask_for_nothing(http: httpx.AsyncClient) -> None:
    await complete(
        http,
        prompt="abc",
        max_tokens=None,
        temperature=None,
        seed=None,
        stop=None,
        suffix="",
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        best_of=1,
        user="me",
        logprobs=None,
        stream_options=None,
    )


async def test_models_info_and_index(http: httpx.AsyncClient) -> None:
    models = (await http.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [("fake", "model", 2000)]
    assert (await http.get("/v1/models/fake")).json() == models["data"][0]
    info = (await http.get("/v1/server_info")).json()
    assert info["model"] == "fake"
    assert info["config"]["server"]["port"] == 30000
    parsers = {"tool_call_parser": "none", "reasoning_parser": "none", "chat_template": "built-in: dialogue"}
    assert info["resolved"] == {"dtype": "float32", "model": parsers | {"sampling_defaults": {}}}
    assert info["engine"]["available"]
    assert info["engine"]["running"] == 0
    assert info["serving"] == {
        "context_length": 2048,
        "max_request_tokens": 2000,
        "vocab_size": 256 + len(ID),
        "speculative_algorithm": "EAGLE3",
        "num_steps": 3,
    }
    assert (await http.get("/")).json()["name"] == "eagle_server"
    assert (await http.get("/health")).json() == {"status": "ok"}
