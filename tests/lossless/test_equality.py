"""Output with speculation is output without, token for token, greedy and seeded alike, for every tree and batch.

Float32 kernels round differently for one row and for many, so a draw whose two best scores lie within 1e-4 might depart
legitimately. The texts here are chosen, and checked in float64, to have no such draw: every departure is a bug.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from eagle_server.engine.engine import Engine
from eagle_server.request import Request
from tests.lossless.conftest import Pair
from tests.support.engines import Finished, plain, random_head, random_target, request, run, speculative, tokens_of
from tests.support.scoring import NEAR_TIE, in_float64, slack

STEPS, TOPKS, PAGES = (1, 3, 6), (1, 4, 8), (1, 16)
TEMPERATURES = (0.0, 0.7, 1.0)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 62, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def mixed_requests() -> list[Request]:
    """Eight requests of mixed lengths and settings; most go on past the end of sequence, so that texts are long."""
    common = prompt(40, 99)
    settings = [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.7, "ignore_eos": True},
        {"temperature": 1.0, "ignore_eos": True, "top_k": 20},
        {"temperature": 0.0, "max_tokens": 17},
        {"temperature": 0.7, "ignore_eos": True, "top_p": 0.8},
        {"temperature": 1.0, "ignore_eos": True, "max_tokens": 21},
        {"temperature": 1.0, "ignore_eos": True, "top_k": 12, "top_p": 0.95},
        {"temperature": 0.7, "min_tokens": 8, "max_tokens": 19},
    ]
    lengths = [41, 60, 44, 1, 47, 17, 33, 5]
    return [
        request(i, (common + prompt(60, i))[:length] if i in (0, 2, 4) else prompt(length, i), seed=100 + i, **setting)
        for i, (length, setting) in enumerate(zip(lengths, settings, strict=True))
    ]


REQUESTS = mixed_requests()


@pytest.fixture(scope="module")
def texts(pair: Pair) -> dict[str, list[int]]:
    """The plain outputs; none of their draws is a near-tie."""
    outcome = run(plain(pair.target), REQUESTS)
    exact = in_float64(pair.target)
    assert min(slack(exact, each, outcome[each.request_id].tokens) for each in REQUESTS) > NEAR_TIE
    return tokens_of(outcome)


def alone(build: Callable[..., Engine]) -> dict[str, Finished]:
    """One request of every temperature, each with the engine to itself."""
    engine = build()
    outcome: dict[str, Finished] = {}
    for each in (REQUESTS[0], REQUESTS[1], REQUESTS[6]):
        outcome |= run(engine, [each])
    return outcome


def batch(build: Callable[..., Engine]) -> dict[str, Finished]:
    """All eight, joining over several cycles, with prompts in chunks."""
    return run(build(chunk_tokens=32), REQUESTS[:4], joining={2: REQUESTS[4:6], 3: REQUESTS[6:7], 5: REQUESTS[7:]})


def preempted(build: Callable[..., Engine]) -> dict[str, Finished]:
    """The pool holds the first four as they are admitted and not a page more, so that the youngest must go."""
    sized = build(radix=False)
    kv, window = sized.scheduler.kv, sized.scheduler.limits.window
    pages = sum(kv.pages_for(len(each.prompt_token_ids) + window) for each in REQUESTS[:4])
    engine = build(max_total_tokens=pages * kv.page_size, chunk_tokens=64)
    outcome = run(engine, REQUESTS)
    assert engine.stats().preemptions > 0
    return outcome


def prefix_hit(build: Callable[..., Engine]) -> dict[str, Finished]:
    """Prompts that share their beginning, after one of them; and prompts that the engine wrote itself in part."""
    engine = build()
    first = run(engine, REQUESTS[:1])
    outcome = run(engine, [REQUESTS[i] for i in (2, 4)])
    again = run(engine, [REQUESTS[i] for i in (0, 1)])
    for name in ("2", "4"):
        assert outcome[name].cached_tokens >= 32
    assert again["0"].cached_tokens >= 32
    assert again["0"].tokens == first["0"].tokens
    return outcome | again


SCENES = {scene.__name__: scene for scene in (alone, batch, preempted, prefix_hit)}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("topk", "steps"), list(itertools.product(TOPKS, STEPS)))
def test_speculative_output_equals_plain_output(
    pair: Pair, texts: Mapping[str, Sequence[int]], topk: int, steps: int, page: int, scene: str
) -> None:
    engines: list[Engine] = []

    def build(**settings: object) -> Engine:
        engines.append(speculative(pair.target, pair.head, steps, topk, page_size=page, **settings))
        return engines[-1]

    outcome = SCENES[scene](build)
    for name, finished in outcome.items():
        assert finished.tokens == texts[name], departure(pair, name, texts[name], finished.tokens)
    totals = [engine.stats() for engine in engines]
    drafted, accepted = sum(t.drafted_tokens for t in totals), sum(t.accepted_tokens for t in totals)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("steps", "topk", "size", "page"),
    [
        (3, 4, 2, 1),  # one drafted node of a pool of 36
        (3, 4, 37, 16),  # the whole pool
        (6, 8, 5, 4),  # drafting needs more slots than verifying
        (2, 3, 4, 5),
        (1, 6, 7, 1),
        (8, 1, 9, 16),
    ],
)
def test_any_tree_size_gives_the_same_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], steps: int, topk: int, size: int, page: int
) -> None:
    engine = speculative(pair.target, pair.head, steps, topk, draft_token_num=size, page_size=page, chunk_tokens=5)
    outcome = run(engine, REQUESTS[:4], joining={3: REQUESTS[4:]})
    assert tokens_of(outcome) == texts
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama multi-head, llama3 rope": {
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral, window 7": {"architectures": ["MistralForCausalLM"], "sliding_window": 7},
    "qwen2, window 5 in one layer": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3, tied": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_changes_nothing_in_any_family(family: str, kind: str, page: int) -> None:
    """Untrained heads with a part of the vocabulary; windows are measured along the path, not by slot."""
    target = random_target(48, seed=3, **FAMILIES[family])
    prompts = torch.randint(1, 48, (4, 40), generator=torch.Generator().manual_seed(8)).tolist()
    requests = [
        request(i, each[: 10 * i + 2], seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], ignore_eos=True)
        for i, each in enumerate(prompts)
    ]
    expected = tokens_of(run(plain(target), requests))
    exact = in_float64(target)
    assert min(slack(exact, each, expected[each.request_id]) for each in requests) > NEAR_TIE
    engine = speculative(target, random_head(target, kind, draft_vocab=40), 3, 8, page_size=page)
    assert tokens_of(run(engine, requests)) == expected
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


def departure(pair: Pair, name: str, expected: Sequence[int], got: Sequence[int]) -> str:
    """Where and how clearly a text departed: for the message of a failure."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    gap = slack(in_float64(pair.target), REQUESTS[int(name)], expected[: at + 1])
    return f"request {name} departs at token {at} of {len(expected)}; the smallest gap up to there is {gap:.2e}"
