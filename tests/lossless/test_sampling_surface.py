"""Every sampling parameter has the same effect with and without speculation: alone, all together, and in any batch.

The expected texts come from plain Python over float64 logits, one token at a time
(tests/support/sampling_reference.py). So the tests find errors that plain decoding and verification have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields

from eagle_server.engine.engine import Engine
from eagle_server.request import FinishReason, Grammar, Request
from eagle_server.speculation import accept as accept_module
from eagle_server.speculation.sampling import draw
from eagle_server.speculation.static_tree import parse_choices, ranks_of, steps_of
from tests.lossless.conftest import Pair
from tests.lossless.test_flashinfer import as_on_a_gpu
from tests.lossless.test_requests import assert_logprobs
from tests.support.engines import Finished, admit_without_reserve, plain, request, run, speculative, tokens_of
from tests.support.sampling_reference import text_of
from tests.support.scoring import NEAR_TIE, in_float64, logits_of
from tests.support.thinning import thinned

pytestmark = pytest.mark.parametrize("pair", ["EAGLE3"], indirect=True, scope="session")
deep = pytest.mark.deep
VOCAB, LENGTH = 62, 18
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]"


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT = prompt(37, 5)


def surface(free: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Settings by name. Each changes the output of the prompt, which is `free` without them."""
    half = tuple(range(0, VOCAB, 2))
    words = ((free[0], free[1]), tuple(free[3:6]), (PROMPT[-1], free[0]), (free[7],), (1, 2, 3, 4, 5))
    biases = ((free[2], -3.0), (free[5], 1.5), (free[8], -100.0), (7, 2.5))
    alone: dict[str, dict[str, Any]] = {
        "repetition up": {"repetition_penalty": 1.6},
        "repetition down": {"repetition_penalty": 0.7},
        "frequency": {"frequency_penalty": 0.6},
        "frequency down": {"frequency_penalty": -0.4},
        "presence": {"presence_penalty": 1.1},
        "bias": {"logit_bias": biases},
        "allowed": {"allowed_token_ids": half},
        "words": {"bad_words": words},
        "min_tokens": {"min_tokens": 12, "stop_token_ids": half, "ignore_eos": False},
        "min_p": {"min_p": 0.3},
        "truncation": {"top_k": 9, "top_p": 0.8},
    }
    together = {
        "repetition_penalty": 1.15,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": ((7, 1.5), (8, -2.0), (9, 0.7)),
        "allowed_token_ids": tuple(t for t in range(VOCAB) if t % 5),
        "bad_words": words,
        "min_tokens": 15,
        "stop_token_ids": (11, 12, 13),
        "min_p": 0.02,
        "top_k": 30,
        "top_p": 0.97,
        "ignore_eos": False,
    }
    return alone | {"all": together}


@dataclass(frozen=True)
class Case:
    """Requests and their expected texts."""

    requests: list[Request]
    texts: dict[str, list[int]]


@pytest.fixture(scope="module")
def case(pair: Pair) -> Case:
    """Every parameter at temperature 0 and 0.8. Each changes the text, and no draw is a near-tie."""
    exact = in_float64(pair.target)
    requests, texts = [], {}
    for temperature in (0.0, 0.8):
        common = {"temperature": temperature, "ignore_eos": True, "max_tokens": LENGTH, "logprobs": 2}
        base = request("free", PROMPT, seed=3, **common)
        free = text_of(exact, base)
        for name, settings in surface(free.tokens).items():
            if temperature == 0 and name in ("min_p", "truncation"):
                continue
            for seed in range(3, 30):
                asked = request(f"{name} {temperature}", PROMPT, **{"seed": seed, **common, **settings})
                text = text_of(exact, asked)
                if text.slack > NEAR_TIE or temperature == 0:
                    break
            assert text.slack > NEAR_TIE, name
            without = text_of(exact, request("without", PROMPT, seed=seed, **common))
            assert text.tokens != without.tokens[: len(text.tokens)], f"{name} changes nothing"
            requests.append(asked)
            texts[asked.request_id] = text.tokens
    return Case(requests, texts)


def alone(build: Callable[..., Engine], requests: list[Request]) -> dict[str, Finished]:
    """Requests with all parameters at once, and a few more, one after the other: request slots are reused."""
    engine = build(disable_radix_cache=True)
    return {name: finished for each in requests[::-4] for name, finished in run(engine, [each]).items()}


def batch(build: Callable[..., Engine], requests: list[Request]) -> dict[str, Finished]:
    """Requests arrive over several cycles, with chunked prompts."""
    engine = build(chunked_prefill_size=16, max_running_requests=8)
    return run(engine, requests[:5], joining={2: requests[5:9], 3: requests[9:14], 7: requests[14:]})


def preempted(build: Callable[..., Engine], requests: list[Request]) -> dict[str, Finished]:
    """The pool holds exactly four requests at admission, so that the youngest is preempted."""
    sized = build(disable_radix_cache=True)
    kv, window = sized.scheduler.kv, sized.scheduler.limits.num_lookahead_slots
    pages = 4 * kv.pages_for(len(PROMPT) + window)
    engine = build(max_total_tokens=pages * kv.page_size, chunked_prefill_size=64)
    admit_without_reserve(engine.scheduler)
    outcome = run(engine, requests)
    assert engine.stats().preemptions > 0
    return outcome


def given_way(build: Callable[..., Engine], requests: list[Request]) -> dict[str, Finished]:
    """Half of the requests come while those of another client run, some of which are preempted for them."""
    engine, half = build(max_running_requests=4, chunked_prefill_size=64), len(requests) // 2
    others = [with_fields(each, client="other") for each in requests[half:]]
    outcome = run(engine, requests[:half], joining={3: others[::2], 9: others[1::2]})
    assert engine.stats().preemptions > 0
    return outcome


def prefix_hit(build: Callable[..., Engine], requests: list[Request]) -> dict[str, Finished]:
    engine = build()
    run(engine, requests[-1:])
    outcome = run(engine, requests)
    assert min(finished.cached_tokens for finished in outcome.values()) >= 32
    return outcome


SCENES = {scene.__name__: scene for scene in (alone, batch, preempted, given_way, prefix_hit)}


def dynamic(pair: Pair, **settings: Any) -> Engine:
    return speculative(pair.target, pair.head, 4, 4, **settings)


def ragged(pair: Pair, **settings: Any) -> Engine:
    """An engine whose trees differ in size."""
    return thinned(dynamic(pair, **settings))


def static(pair: Pair, **settings: Any) -> Engine:
    choices = parse_choices(TREE)
    numbers = {"nodes": len(choices) + 1, "choices": choices, **settings}
    return speculative(pair.target, pair.head, steps_of(choices), ranks_of(choices), **numbers)


def ngram(pair: Pair, **settings: Any) -> Engine:
    return plain(pair.target, **{"ngram_steps": 5, "nodes": 9, **settings})


def mixture(pair: Pair, **settings: Any) -> Engine:
    return speculative(pair.target, pair.head, 3, 4, **{"ngram_steps": 5, **settings})


def captured(pair: Pair, **settings: Any) -> Engine:
    """An engine with emulated graphs, so that batches are padded."""
    return dynamic(pair, **{**as_on_a_gpu(), **settings})


DRAFTERS = {build.__name__: build for build in (dynamic, ragged, static, ngram, mixture, captured)}
PAIRINGS = [
    pytest.param(dynamic, alone, marks=deep),
    (dynamic, batch),
    (dynamic, preempted),
    (dynamic, given_way),
    pytest.param(dynamic, prefix_hit, marks=deep),
    (ragged, batch),
    pytest.param(ragged, preempted, marks=deep),
    (static, batch),
    pytest.param(mixture, given_way, marks=deep),
    (ngram, alone),
    pytest.param(ngram, preempted, marks=deep),
    (mixture, batch),
    pytest.param(captured, batch, marks=deep),
]


@pytest.mark.parametrize(
    "scene", ["alone", "batch", *(pytest.param(s, marks=deep) for s in ("preempted", "given_way", "prefix_hit"))]
)
def test_plain_text_is_the_references(pair: Pair, case: Case, scene: str) -> None:
    outcome = SCENES[scene](lambda **settings: plain(pair.target, **settings), case.requests)
    assert tokens_of(outcome) == {name: case.texts[name] for name in outcome}


@pytest.mark.parametrize(("drafter", "scene"), PAIRINGS, ids=lambda part: part.__name__)
def test_speculative_text_is_the_references(
    pair: Pair, case: Case, drafter: Callable[..., Engine], scene: Callable[..., dict[str, Finished]]
) -> None:
    engines: list[Engine] = []

    def build(**settings: Any) -> Engine:
        engines.append(drafter(pair, **settings))
        return engines[-1]

    outcome = scene(build, case.requests)
    assert tokens_of(outcome) == {name: case.texts[name] for name in outcome}
    totals = [engine.stats() for engine in engines]
    assert 0 < sum(t.accepted_tokens for t in totals) < sum(t.drafted_tokens for t in totals)


def test_every_parameter_was_speculated_with(pair: Pair, case: Case) -> None:
    """Every request has accepted drafts and rejected drafts."""
    for name, finished in run(dynamic(pair), case.requests).items():
        assert finished.spec is not None
        assert 0 < finished.spec.accepted < finished.spec.drafted, name


def test_log_probabilities_are_the_raw_models_for_all_parameters(pair: Pair, case: Case) -> None:
    exact = in_float64(pair.target)
    for build in (lambda pair: plain(pair.target), dynamic, ragged, ngram):
        outcome = run(build(pair), [with_prompt_logprobs(each) for each in case.requests])
        for name, finished in outcome.items():
            assert finished.tokens == case.texts[name]
            dense = logits_of(exact, [*PROMPT, *finished.tokens])[:-1]
            assert_logprobs(finished.logprobs, finished.tokens, dense[len(PROMPT) - 1 :], 2)
            assert_logprobs(finished.prompt_logprobs, PROMPT[1:], dense[: len(PROMPT) - 1], 2)


def with_prompt_logprobs(asked: Request) -> Request:
    return with_fields(asked, prompt_logprobs=True)


PATH_DEPENDENT: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 3.0},
    "words": {"bad_words": tuple((a, b) for a in range(VOCAB) for b in range(a % 3, VOCAB, 3))},
}


@pytest.mark.parametrize(
    "name", ["repetition", "words", *(pytest.param(n, marks=deep) for n in ("frequency", "presence"))]
)
def test_transforms_that_ignore_the_path_are_caught(pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant uses the root's penalizer state at every node."""
    settings = {"temperature": 0.5, "ignore_eos": True, **PATH_DEPENDENT[name]}
    requests = [request(seed, PROMPT[seed:], seed=seed, **settings) for seed in range(8)]
    expected = tokens_of(run(plain(pair.target), requests))
    assert tokens_of(run(dynamic(pair), requests)) == expected
    monkeypatch.setattr(accept_module, "draw", lambda *given: draw(*given[:3]))
    assert tokens_of(run(dynamic(pair), requests)) != expected


@pytest.mark.parametrize("drafter", [*(pytest.param(d, marks=deep) for d in ("dynamic", "ngram")), "mixture"])
def test_requests_without_speculation_do_not_disable_it_for_others(pair: Pair, case: Case, drafter: str) -> None:
    requests = [with_fields(each, speculative=number % 2 == 0) for number, each in enumerate(case.requests[:8])]
    outcome = run(DRAFTERS[drafter](pair), requests)
    whole = run(DRAFTERS[drafter](pair), case.requests[:8])
    assert tokens_of(outcome) == {each.request_id: case.texts[each.request_id] for each in requests}
    for each in requests:
        spec = outcome[each.request_id].spec
        if not each.speculative:
            assert spec is None
        elif drafter != "mixture":  # a mixture's trees depend on the accepted drafts of all requests
            assert spec is not None and (other := whole[each.request_id].spec) is not None
            assert spec.histogram == other.histogram


def outcomes(pair: Pair, asked: Request) -> list[tuple[list[int], FinishReason | None, str | None]]:
    """(text, reason, error) with plain decoding, with dynamic trees and with n-grams."""
    builds: tuple[Any, ...] = (lambda pair: plain(pair.target), dynamic, ngram)
    found = [run(build(pair), [asked])[asked.request_id] for build in builds]
    return [(each.tokens, each.reason, each.error) for each in found]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_fails_when_no_token_is_allowed_unless_it_ends_before(pair: Pair, temperature: float) -> None:
    """Only token 5 is allowed, but not three times in a row. The prompt makes n-grams draft more than two."""
    settings = {"allowed_token_ids": (5,), "bad_words": ((5, 5, 5),), "temperature": temperature, "logprobs": 0}
    for length, reason in ((1, FinishReason.LENGTH), (2, FinishReason.LENGTH), (3, FinishReason.REFUSED)):
        asked = request("a", [7, 5, 5, 5, 5, 5, 7, 5, 5, 5, 5, 7], max_tokens=length, **settings)
        for tokens, why, error in outcomes(pair, asked):
            assert (tokens, why) == ([5] * min(length, 2), reason)
            assert (error is None) == (why is FinishReason.LENGTH)
            assert error is None or error.startswith("no token may follow")
    stopping = request("b", [7, 5, 5, 5, 7, 5, 5, 5, 7], stop_token_ids=(5,), min_tokens=1, **settings)
    assert {(*tokens, why) for tokens, why, _ in outcomes(pair, stopping)} == {(FinishReason.REFUSED,)}
    stopping = with_fields(stopping, sampling=with_fields(stopping.sampling, min_tokens=0))
    assert {(*tokens, why) for tokens, why, _ in outcomes(pair, stopping)} == {(5, FinishReason.STOP)}


REFUSED: dict[str, dict[str, Any]] = {
    "logit_bias: token id 64 is outside the vocabulary of 64": {"logit_bias": ((3, 1.0), (64, 1.0))},
    "allowed_token_ids: token id -1 is outside": {"allowed_token_ids": (4, -1)},
    "bad_words: token id 99 is outside": {"bad_words": ((1, 2), (3, 99))},
    "allowed_token_ids is empty": {"allowed_token_ids": ()},
    "bad_words: a word has no tokens": {"bad_words": ((1,), ())},
    "the logit_bias of token id 3 is inf": {"logit_bias": ((3, float("inf")),)},
    "repetition_penalty is 0.0; it must be from 0.01 to 100": {"repetition_penalty": 0.0},
    "repetition_penalty is 1e-38; it must be from 0.01 to 100": {"repetition_penalty": 1e-38},
    "repetition_penalty is nan": {"repetition_penalty": float("nan")},
    "presence_penalty is inf": {"presence_penalty": float("inf")},
    "frequency_penalty is nan": {"frequency_penalty": float("nan")},
    "temperature is -1.0": {"temperature": -1.0},
    "top_p is 0.0": {"top_p": 0.0},
    "min_p is 1.5": {"min_p": 1.5},
    "top_k is -1": {"top_k": -1},
    "allowed_token_ids: bad_words": {"allowed_token_ids": (4, 5, 6), "bad_words": ((4,), (5,), (6,), (7, 8))},
    "allowed_token_ids: bad_words and min_tokens": {
        "allowed_token_ids": (4, 5),
        "bad_words": ((4,),),
        "stop_token_ids": (5,),
        "min_tokens": 1,
    },
    "bad_words and min_tokens together": {"bad_words": tuple((token,) for token in range(64))},
    "grammar: this engine cannot follow one": {"grammar": Grammar(kind="json_object")},
}


def test_an_invalid_parameter_is_refused_and_other_requests_do_not_change(pair: Pair, case: Case) -> None:
    engine = dynamic(pair)
    wrong = [request(reason, PROMPT, **settings) for reason, settings in REFUSED.items()]
    outcome = run(engine, [*wrong, case.requests[0]])
    for reason in REFUSED:
        assert outcome[reason].reason is FinishReason.REFUSED
        assert (outcome[reason].error or "").startswith(reason)
    first = case.requests[0].request_id
    assert outcome[first].tokens == case.texts[first]
