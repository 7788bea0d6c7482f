"""The settings of one request hold under speculation, and do not affect other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import asdict
from torch import Tensor

from eagle_server.engine.engine import Engine
from eagle_server.models.drafts.interface import DraftOutput
from eagle_server.plan import CycleResult
from eagle_server.request import FinishReason, TokenDelta, TokenLogprob
from tests.lossless.conftest import eagle_is_deep
from tests.lossless.pairs import Pair
from tests.support.engines import Finished, admit_without_reserve, plain, request, run, speculative
from tests.support.scoring import in_float64, logits_of
from tests.support.wrapped_head import WrappedHead

pytestmark = eagle_is_deep
each_temperature = pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.deep), 1.0])

TOLERANCE = 1e-4
SAMPLED = {"temperature": 1.0, "ignore_eos": True}


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 62, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drafting(pair: Pair, **settings: Any) -> Engine:
    return speculative(pair.target, pair.head, 4, 4, **settings)


def same(one: Finished, other: Finished) -> bool:
    return one.tokens == other.tokens and one.reason is other.reason and close(one.logprobs, other.logprobs)


def close(one: Sequence[TokenLogprob], other: Sequence[TokenLogprob]) -> bool:
    """Whether tokens and log-probabilities are equal. Alternatives are compared by value, as near-ties may swap."""
    if [entry.token_id for entry in one] != [entry.token_id for entry in other]:
        return False
    numbers = [[[e.logprob, *(value for _, value in e.top)] for e in entries] for entries in (one, other)]
    return torch.allclose(torch.tensor(numbers[0]), torch.tensor(numbers[1]), rtol=0, atol=TOLERANCE)


def test_a_batch_of_mixed_settings_gives_what_each_request_gives_alone(pair: Pair) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.7, "top_p": 0.6, "logprobs": 3},
        {"temperature": 1.3, "top_k": 10, "top_p": 0.9, "ignore_eos": True},
        {"temperature": 0.8, "min_tokens": 12, "stop_token_ids": tuple(range(20))},
        {"temperature": 0.0, "logprobs": 0, "max_tokens": 3},
        {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": tuple(range(0, 62, 2))},
        {"temperature": 1.0, "stop_token_ids": tuple(range(10))},
        {"temperature": 0.01, "seed": 77},
        {"temperature": 1.0, "max_tokens": 1},
    ]
    requests = [request(i, prompt(5 + 4 * i, i), **{"seed": i, **s}) for i, s in enumerate(settings)]
    together = run(drafting(pair), requests)
    for each in requests:
        assert same(together[each.request_id], run(drafting(pair), [each])[each.request_id]), each


def test_a_seed_gives_one_text_and_each_choice_its_own(pair: Pair) -> None:
    common = {"temperature": 1.0, "ignore_eos": True, "seed": 5}
    requests = [
        *(request(f"choice {i}", prompt(9, 1), choice=i, **common) for i in range(4)),
        request("again", prompt(9, 1), choice=2, **common),
        request("other seed", prompt(9, 1), choice=2, **{**common, "seed": 6}),
    ]
    outcome = run(drafting(pair), requests)
    assert outcome["again"].tokens == outcome["choice 2"].tokens
    del outcome["again"]
    assert len({tuple(finished.tokens) for finished in outcome.values()}) == 5


def test_logprobs_are_those_of_the_raw_model_with_and_without_speculation(pair: Pair) -> None:
    """Temperature, truncation and forbidden tokens change the draw, but not the log-probabilities."""
    stops = tuple(range(0, 62, 3))
    settings: list[dict[str, Any]] = [
        {"logprobs": 0},
        {"logprobs": 5, "temperature": 0.7, "top_k": 3, "top_p": 0.9},
        {"logprobs": 5, "temperature": 1.0, "min_tokens": 20, "stop_token_ids": stops},
        {"logprobs": 2, "temperature": 0.0, "min_tokens": 20, "stop_token_ids": stops},
    ]
    requests = [request(i, prompt(30, i), seed=i, **s) for i, s in enumerate(settings)]
    engine = drafting(pair)
    outcome, expected = run(engine, requests), run(plain(pair.target), requests)
    assert engine.stats().accepted_tokens > 0
    exact = in_float64(pair.target)
    for each, asked in zip(requests, settings, strict=True):
        finished = outcome[each.request_id]
        assert same(finished, expected[each.request_id])
        text = [*each.prompt_token_ids, *finished.tokens]
        dense = logits_of(exact, text)[len(each.prompt_token_ids) - 1 : -1]
        assert_logprobs(finished.logprobs, finished.tokens, dense, asked["logprobs"])


def assert_logprobs(entries: Sequence[TokenLogprob], tokens: Sequence[int], logits: Tensor, count: int) -> None:
    """Assert that entry i has the log-probabilities of logits[i], and that its alternatives are the best tokens."""
    assert [entry.token_id for entry in entries] == list(tokens)
    for entry, row in zip(entries, logits.log_softmax(-1), strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
        best = row.topk(max(count, 1)).values[:count].tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
        assert [value for _, value in entry.top] == pytest.approx([float(row[t]) for t, _ in entry.top], abs=TOLERANCE)


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("build", [drafting, lambda pair, **settings: plain(pair.target, **settings)])
def test_prompt_logprobs_equal_a_dense_rescoring(pair: Pair, build: Callable[..., Engine], chunk: int) -> None:
    """Also for a cached prompt, for a request without output tokens, and for a prompt of one token."""
    engine = build(pair, chunked_prefill_size=chunk)
    cached = prompt(40, 3)
    run(engine, [request("warm", cached)])
    requests = [
        request("cached", cached, prompt_logprobs=True, logprobs=3),
        request("echo", prompt(23, 4), prompt_logprobs=True, logprobs=0, max_tokens=0),
        request("short", prompt(1, 5), prompt_logprobs=True, logprobs=2),
        request("other", prompt(17, 6)),
    ]
    outcome = run(engine, requests)
    assert outcome["echo"].tokens == []
    assert outcome["echo"].reason is FinishReason.LENGTH
    assert outcome["other"].prompt_logprobs == []
    for each in requests[:3]:
        tokens, finished = each.prompt_token_ids, outcome[each.request_id]
        dense = logits_of(in_float64(pair.target), tokens)[:-1]
        assert_logprobs(finished.prompt_logprobs, tokens[1:], dense, each.sampling.logprobs or 0)


def test_prompt_logprobs_come_once_and_whole_when_the_request_is_preempted(pair: Pair) -> None:
    requests = [request(i, prompt(40, i), prompt_logprobs=True, logprobs=1, **SAMPLED) for i in range(3)]
    engine = drafting(pair, max_total_tokens=174, chunked_prefill_size=16)
    admit_without_reserve(engine.scheduler)
    outcome = run(engine, requests)
    assert engine.stats().preemptions > 0
    for each in requests:
        dense = logits_of(in_float64(pair.target), each.prompt_token_ids)[:-1]
        assert_logprobs(outcome[each.request_id].prompt_logprobs, each.prompt_token_ids[1:], dense, 1)
        assert len(outcome[each.request_id].logprobs) == 24


def watch_cuts(engine: Engine) -> list[int]:
    """A list that receives, for every decode from now on, how many tokens after the request's end were cut off."""
    scheduler, commit, cuts = engine.scheduler, engine.scheduler.commit, list[int]()

    def watched(result: CycleResult) -> list[TokenDelta]:
        before = [(each, len(each.tokens)) for each in scheduler.running if not each.prefilling]
        deltas = commit(result)
        for (sequence, length), output in zip(before, result.decodes, strict=True):
            cuts.append(len(output.tokens) - (len(sequence.tokens) - length))
        return deltas

    scheduler.commit = watched  # type: ignore[method-assign]
    return cuts


@each_temperature
def test_nothing_is_drafted_that_max_tokens_would_cut(pair: Pair, temperature: float) -> None:
    settings = {"temperature": temperature, "ignore_eos": True}
    whole = run(plain(pair.target), [request(i, prompt(12, i), seed=i, max_tokens=16, **settings) for i in range(4)])
    requests = [
        request(f"{i} {n}", prompt(12, i), seed=i, max_tokens=n, **settings) for i in range(4) for n in range(1, 17)
    ]
    engine = drafting(pair)
    cuts = watch_cuts(engine)
    outcome = run(engine, requests)
    for each in requests:
        name, length = each.request_id.split()
        assert outcome[each.request_id].tokens == whole[name].tokens[: int(length)]
        assert outcome[each.request_id].reason is FinishReason.LENGTH
    assert not any(cuts)
    assert engine.stats().accepted_tokens > 0


@each_temperature
def test_stop_tokens_cut_inside_an_accepted_path(pair: Pair, temperature: float) -> None:
    """Each token of a text is the stop token of one request. The request ends at its first occurrence."""
    settings = {"temperature": temperature, "ignore_eos": True, "max_tokens": 20}
    whole = run(plain(pair.target), [request(i, prompt(12, i), seed=i, **settings) for i in range(4)])
    requests = [
        request(f"{name} {token}", prompt(12, int(name)), seed=int(name), stop_token_ids=(token, 61), **settings)
        for name, finished in whole.items()
        for token in sorted(set(finished.tokens))
    ]
    engine = drafting(pair)
    cuts = watch_cuts(engine)
    outcome = run(engine, requests)
    for each in requests:
        name, token = each.request_id.split()
        expected = whole[name].tokens
        end = min(expected.index(stop) for stop in (int(token), 61) if stop in expected)
        assert outcome[each.request_id].tokens == expected[: end + 1]
        assert outcome[each.request_id].reason is FinishReason.STOP
    assert max(cuts) > 1, "no path was cut before its last drafted token"


def test_the_end_of_sequence_ends_a_text_unless_it_is_ignored(pair: Pair) -> None:
    (eos,) = pair.target.config.eos_token_ids
    requests = [request(i, prompt(6, i), seed=i, temperature=1.2, max_tokens=60) for i in range(24)]
    outcome = run(drafting(pair), requests)
    ended = [each for each in requests if outcome[each.request_id].reason is FinishReason.STOP]
    assert ended
    assert all(outcome[each.request_id].tokens.index(eos) + 1 == len(outcome[each.request_id].tokens) for each in ended)
    going_on = [
        request(each.request_id, each.prompt_token_ids, **{**asdict(each.sampling), "ignore_eos": True})
        for each in ended
    ]
    for name, finished in run(drafting(pair), going_on).items():
        assert finished.reason is FinishReason.LENGTH
        assert finished.tokens[: len(outcome[name].tokens)] == outcome[name].tokens


@each_temperature
def test_min_tokens_forbids_stops_before_it_and_not_after(pair: Pair, temperature: float) -> None:
    stops = tuple(range(0, 62, 2))
    lengths = range(1, 20, 3)
    requests = [
        request(f"{i} {n}", prompt(8, i), seed=i, temperature=temperature, min_tokens=n, stop_token_ids=stops)
        for i in range(4)
        for n in lengths
    ]
    engine = drafting(pair)
    outcome, expected = run(engine, requests), run(plain(pair.target), requests)
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
    beyond = []
    for each in requests:
        finished, least = outcome[each.request_id], each.sampling.min_tokens
        assert same(finished, expected[each.request_id])
        assert not set(finished.tokens[:least]) & {*stops, *pair.target.config.eos_token_ids}
        assert len(finished.tokens) > least
        beyond.append(len(finished.tokens) - least)
    assert min(beyond) == 1, "a stop may follow at once"


def test_a_broken_head_only_lowers_acceptance(pair: Pair) -> None:
    """NaN from a head never reaches a text."""
    requests = [request(i, prompt(20, i), seed=i, **SAMPLED) for i in range(4)]

    class Broken(WrappedHead):
        def forward(self, *args: Any) -> DraftOutput:
            out = super().forward(*args)
            return DraftOutput(out.feedback * float("nan"), out.normed)

        def logits(self, normed: Tensor) -> Tensor:
            return super().logits(normed) * float("nan")

    engine = speculative(pair.target, Broken(pair.head), 4, 4)
    outcome, expected = run(engine, requests), run(plain(pair.target), requests)
    assert all(same(outcome[name], expected[name]) for name in expected)
    assert engine.stats().drafted_tokens > 0
