"""Eight requests, the scenes in which the engine runs them, and the emulated GPU backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eagle_server.engine.engine import Engine
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.request import Request
from tests.support.engines import Finished, admit_without_reserve, request, run
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder
from tests.support.scoring import in_float64, slack

SIZES = (1, 2, 4, 8)  # batch sizes of the captured graphs


def as_on_a_gpu(sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Settings for the flashinfer backend, with emulated wrappers and emulated CUDA graphs."""
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
    return {"backend": "flashinfer", "graph_sizes": sizes, "stand_ins": stand_ins, "max_running_requests": max(SIZES)}


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 62, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def mixed_requests() -> list[Request]:
    """Eight requests of mixed lengths and settings. Most ignore the end of sequence, so that texts are long."""
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
Build = Callable[..., Engine]


def alone(build: Build) -> dict[str, Finished]:
    """One request of each temperature, one after the other."""
    engine = build()
    outcome: dict[str, Finished] = {}
    for each in (REQUESTS[0], REQUESTS[1], REQUESTS[6]):
        outcome |= run(engine, [each])
    return outcome


def batch(build: Build) -> dict[str, Finished]:
    """All eight requests, with chunked prompts. They arrive over several cycles."""
    return run(
        build(chunked_prefill_size=32), REQUESTS[:4], joining={2: REQUESTS[4:6], 3: REQUESTS[6:7], 5: REQUESTS[7:]}
    )


def preempted(build: Build) -> dict[str, Finished]:
    """The pool holds exactly the first four requests at admission, so that the youngest is preempted."""
    sized = build(disable_radix_cache=True, graph_sizes=())
    kv, window = sized.scheduler.kv, sized.scheduler.limits.num_lookahead_slots
    pages = sum(kv.pages_for(len(each.prompt_token_ids) + window) for each in REQUESTS[:4])
    engine = build(max_total_tokens=pages * kv.page_size, chunked_prefill_size=64)
    admit_without_reserve(engine.scheduler)
    outcome = run(engine, REQUESTS)
    assert engine.stats().preemptions > 0
    return outcome


def prefix_hit(build: Build) -> dict[str, Finished]:
    """Prompts with a cached prefix: first a shared prefix, then the same prompts again."""
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


def play(scene: str, build: Build) -> tuple[dict[str, Finished], list[Engine]]:
    """The outcome of a scene, and the engines built for it."""
    engines: list[Engine] = []

    def recorded(**settings: Any) -> Engine:
        engines.append(build(**settings))
        return engines[-1]

    return SCENES[scene](recorded), engines


def check(
    target: TargetModel, outcome: Mapping[str, Finished], texts: Mapping[str, Sequence[int]], engines: Sequence[Engine]
) -> None:
    """Assert that the texts equal plain decoding, and that some drafts were accepted and some rejected."""
    for name, finished in outcome.items():
        assert finished.tokens == texts[name], departure(target, name, texts[name], finished.tokens)
    totals = [engine.stats() for engine in engines]
    assert 0 < sum(t.accepted_tokens for t in totals) < sum(t.drafted_tokens for t in totals)


def departure(target: TargetModel, name: str, expected: Sequence[int], got: Sequence[int]) -> str:
    """A failure message: where a text differs from the expected one, and how clear the draws were up to there."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    gap = slack(in_float64(target), REQUESTS[int(name)], expected[: at + 1])
    return f"request {name} departs at token {at} of {len(expected)}; the smallest gap up to there is {gap:.2e}"
