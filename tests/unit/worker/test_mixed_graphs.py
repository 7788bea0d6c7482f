"""Mixed forwards through captured graphs: which are captured, when, and that no text changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle_server.attention.batches import CAPTURED_PIECES
from eagle_server.attention.flashinfer import wrappers
from eagle_server.engine.engine import Engine
from eagle_server.request import Request
from eagle_server.worker import verifier, worker
from eagle_server.worker.verifier import Verifier
from tests.support.deepseek import DEEPSEEK
from tests.support.engines import (
    admit_without_reserve,
    plain,
    random_head,
    random_target,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder

TREES: dict[str, dict[str, Any]] = {
    "tree": {},
    "chain": {"topk": 1, "nodes": 4},
    "cascade": {"verify_attention": "cascade"},
}
SIZES = (1, 2, 4)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, 40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def asked() -> tuple[list[Request], dict[int, list[Request]]]:
    """Two long texts, beside which prompts of many lengths begin. Some share a prefix, some sample."""
    long = {"ignore_eos": True, "max_tokens": 40}
    shared = prompt(40, 9)
    prompts = [prompt(n, n) for n in (1, 31, 32, 33, 64, 65, 90)] + [shared + prompt(n, n) for n in (3, 20)]
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 9}]
    others = [
        request(10 + i, each, seed=i, ignore_eos=True, max_tokens=3 + i % 3 if i % 4 else 30, **settings[i % 3])
        for i, each in enumerate(prompts)
    ]
    joining = {2 + 3 * i: [each] for i, each in enumerate(others)}
    return [request(i, prompt(9 + 6 * i, i), seed=i, temperature=0.7 * i, **long) for i in range(2)], joining


FIRST, JOINING = asked()
EVERYTHING = [*FIRST, *(each for more in JOINING.values() for each in more)]


def serving(target: Any, head: Any, **settings: Any) -> Engine:
    stand_ins = {"flashinfer": Emulation(), "recorder": FirstCallRecorder()}
    numbers = {"graph_sizes": SIZES, "max_running_requests": 4, "chunked_prefill_size": 96, **settings}
    return speculative(target, head, backend="flashinfer", stand_ins=stand_ins, **numbers)


def capture(engine: Engine) -> int:
    """What the engine's loop does in a pause. Returns how many graphs were captured."""
    before = len(engine.worker.verifier.graphs.keys)
    while engine.lacks_graphs:
        engine.capture_graph()
    engine.scheduler.kv.clear()
    return len(engine.worker.verifier.graphs.keys) - before


def serve(engine: Engine, **given: Any) -> dict[str, list[int]]:
    return tokens_of(run(engine, FIRST, joining=JOINING, **given))


Seen = list[tuple[int, int | None]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Mixed forwards: requests that decode, with padding, and pieces; None: it was eager."""
    found: Seen = []
    mixed = Verifier.mixed

    def watched(self: Verifier, batch: Any, tree: Any, prompts: Any, chunks: Any, pieces: Any = None) -> Any:
        found.append((len(batch.seq_lens_host), None if pieces is None else len(pieces.layout.q_lens)))
        return mixed(self, batch, tree, prompts, chunks, pieces)

    monkeypatch.setattr(Verifier, "mixed", watched)
    return found


@pytest.mark.parametrize("shape", TREES)
def test_texts_are_those_of_plain_decoding_eager_and_captured(
    shape: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_MISSES", 1000)
    target = random_target()
    head = random_head(target, "EAGLE3")
    expected = tokens_of(run(plain(target), EVERYTHING))
    engine = serving(target, head, **TREES[shape])
    seen.clear()
    keys = engine.worker.verifier.graphs.keys
    assert [key[0] for key in keys].count("read") == len(CAPTURED_PIECES), "the head's reading of prompts"
    assert serve(engine) == expected
    assert len(seen) > 5 and all(pieces is None for _, pieces in seen)
    assert engine.worker.verifier.graphs.keys == keys, "no graph is captured while requests run"
    assert 1 < capture(engine) <= len(SIZES) * len(CAPTURED_PIECES)
    seen.clear()
    assert serve(engine) == expected
    assert {pieces for _, pieces in seen} == {*CAPTURED_PIECES}
    assert {size for size, _ in seen} >= {2, 4}
    assert not engine.lacks_graphs
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize("misses", [1, 2])
def test_without_a_pause_a_cycle_captures_what_was_missed(
    misses: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_MISSES", misses)
    target = random_target()
    head = random_head(target, "EAGLE3")
    expected = tokens_of(run(plain(target), EVERYTHING))
    engine = serving(target, head)
    seen.clear()
    before = len(engine.worker.verifier.graphs.keys)
    assert serve(engine) == expected
    captured = len(engine.worker.verifier.graphs.keys) - before
    eager = sum(pieces is None for _, pieces in seen)
    assert 1 < captured <= len(SIZES) * len(CAPTURED_PIECES)
    assert (eager == 0) == (misses == 1) and engine.lacks_graphs == (misses > 1)
    assert len(seen) - eager >= captured


def captured(target: Any, head: Any, **settings: Any) -> Engine:
    """An engine with the graphs of the mixed forwards that `serve` runs."""
    engine = serving(target, head, **settings)
    serve(engine)
    assert capture(engine)
    return engine


MODELS: dict[str, dict[str, Any]] = {
    "a query head per KV head": {"num_key_value_heads": 4},
    "latent attention": {**DEEPSEEK, "num_hidden_layers": 3, "num_nextn_predict_layers": 0},
    "sliding windows": {"architectures": ["MistralForCausalLM"], "sliding_window": 7},
}


@pytest.mark.deep
@pytest.mark.parametrize("model", MODELS)
def test_texts_of_other_models_are_those_of_plain_decoding(model: str, seen: Seen) -> None:
    target = random_target(**MODELS[model])
    expected = tokens_of(run(plain(target), EVERYTHING))
    engine = captured(target, random_head(target, "EAGLE3"))
    seen.clear()
    assert serve(engine) == expected
    assert {pieces for _, pieces in seen} == {*CAPTURED_PIECES}


@pytest.mark.parametrize("drafter", ["EAGLE3", pytest.param("PEAGLE", marks=pytest.mark.deep), None])
def test_texts_survive_aborts_and_preemptions(drafter: str | None, seen: Seen) -> None:
    target = random_target()
    expected = tokens_of(run(plain(target), EVERYTHING))
    if drafter is None:
        engine = captured(target, None, model_steps=0, topk=1, nodes=1, max_total_tokens=150)
    else:
        engine = captured(target, random_head(target, drafter), max_total_tokens=150)
    admit_without_reserve(engine.scheduler)
    seen.clear()
    found = serve(engine, each_cycle=lambda cycle: engine.abort("12") if cycle == 9 else None)
    aborted = found.pop("12", [])
    assert aborted == expected.pop("12")[: len(aborted)]
    assert found == expected
    assert engine.stats().preemptions
    assert any(pieces is not None for _, pieces in seen)


def test_a_replay_plans_nothing_on_the_host_and_uploads_its_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target()
    engine = captured(target, random_head(target, "EAGLE3"))
    counts, mixed = Counter[str](), Verifier.mixed

    def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    def watched(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(wrappers.PagedWrapper, "plan", counted(wrappers.PagedWrapper.plan, "plans"))
            patch.setattr(verifier, "upload", counted(verifier.upload, "uploads"))
            return mixed(*args)

    monkeypatch.setattr(Verifier, "mixed", counted(watched, "forwards"))
    serve(engine)
    assert counts == {"forwards": counts["uploads"], "uploads": counts["uploads"]}
    assert counts["uploads"] > 5


def test_padding_writes_the_padding_slot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target()
    engine = captured(target, random_head(target, "EAGLE3"))
    mixed, padded = Verifier.mixed, 0

    def watched(self: Verifier, batch: Any, tree: Any, prompts: Any, chunks: Any, pieces: Any = None) -> Any:
        nonlocal padded
        before = [keys.clone() for keys in self.pool.keys]
        found = mixed(self, batch, tree, prompts, chunks, pieces)
        assert pieces is not None
        table, size = engine.scheduler.kv.table.slots, tree.size
        allowed = {0}
        for decode in batch.decodes:
            allowed |= {*table[decode.req_pool_index, decode.seq_len : decode.seq_len + size].tolist()}
        for chunk in chunks:
            allowed |= {*table[chunk.req_pool_index, chunk.start : chunk.start + len(chunk.tokens)].tolist()}
        for old, new in zip(before, self.pool.keys, strict=True):
            changed = ~((old == new) | (old.isnan() & new.isnan())).flatten(1).all(1)
            assert {*changed.nonzero()[:, 0].tolist()} <= allowed
        padded += found[1].padding
        assert len(found[1].features) == sum(len(chunk.tokens) for chunk in chunks)
        return found

    monkeypatch.setattr(Verifier, "mixed", watched)
    serve(engine)
    assert padded > 100


def test_log_probabilities_of_prompts_and_texts_at_the_end_of_the_context_are_not_captured(seen: Seen) -> None:
    target = random_target()
    engine = captured(target, random_head(target, "EAGLE3"), context_length=80)
    seen.clear()
    asked = request(90, prompt(20, 3), max_tokens=2, ignore_eos=True, logprobs=0, prompt_logprobs=True)
    run(engine, FIRST, joining={3: [asked], 6: [request(91, prompt(78, 4), max_tokens=2)]})
    assert len(seen) == 2 and all(pieces is None for _, pieces in seen)
