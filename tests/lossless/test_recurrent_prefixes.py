"""Prefix hits of targets with recurrent layers end at checkpoints of their states, and change no text.

What nobody may read is filled with NaN after every cycle: the states of requests that have left, and free checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_server.cache.block_events import BlockEvents
from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.native.library import available
from eagle_server.request import FinishReason, Request
from eagle_server.scheduling.sequence import Sequence
from tests.lossless.scenes import as_on_a_gpu
from tests.lossless.test_recurrent import DRAFTERS, VOCABULARY, Drafted
from tests.support.covering import covering, deep_unless
from tests.support.engines import (
    CONTEXT,
    MARGIN,
    Finished,
    admit_without_reserve,
    plain,
    random_head,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.hybrids import HYBRIDS, hybrid_config, hybrid_target
from tests.support.kv_events import MirroredBlocks, reachable_prefixes
from tests.support.scoring import NEAR_TIE, in_float64, slack

TURNS, CONVERSATIONS = 3, 3
SYSTEM = 40  # tokens that all conversations begin with
BUILDS: dict[str, Drafted] = {"NONE": plain, **DRAFTERS}
OTHERS = tuple(name for name in HYBRIDS if name != "qwen3.5")
SMALL = {"chunked_prefill_size": 24, "checkpoint_interval": 32}


def words(count: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def turn(number: int, conversation: int, history: Seq[int], **settings: Any) -> Request:
    seed = 10 * conversation + number
    prompt = [*history, *words(5 + 6 * conversation, 200 + seed)]
    temperature = (0.0, 0.8)[conversation % 2]
    options = {"temperature": temperature, "seed": seed, "max_tokens": 14 + conversation, "ignore_eos": True}
    return request(f"{conversation}.{number}", prompt, **options, **settings)


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "qwen3.5")


@pytest.fixture(scope="module")
def target(kind: str) -> TargetModel:
    return hybrid_target(VOCABULARY, kind)


@pytest.fixture(scope="module")
def turns(target: TargetModel) -> list[dict[str, tuple[Request, list[int]]]]:
    """For each turn, the request of every conversation and its plain text. None of the draws is a near-tie."""
    exact, system, found = in_float64(target), words(SYSTEM, 99), list[dict[str, tuple[Request, list[int]]]]()
    histories = {number: system for number in range(CONVERSATIONS)}
    for number in range(TURNS):
        requests = [turn(number, conversation, history) for conversation, history in histories.items()]
        texts = tokens_of(run(plain(target, disable_radix_cache=True), requests))
        assert min(slack(exact, each, texts[each.request_id]) for each in requests) > NEAR_TIE
        found.append({each.request_id: (each, texts[each.request_id]) for each in requests})
        histories = {i: [*each.prompt_token_ids, *texts[each.request_id]] for i, each in enumerate(requests)}
    return found


def poison_unused(engine: Engine) -> None:
    kv, states = engine.scheduler.kv, engine.worker.verifier.states
    assert states is not None
    assert kv.radix is not None
    assert kv.radix.checkpoints is not None
    used = {each.req_pool_index for each in kv.allocations} | {save.req_pool_index for save in kv._saves}
    states.pool.poison([*set(range(kv.table.rows)).difference(used), *kv.radix.checkpoints._free])


def talk(
    engine: Engine, turns: Seq[dict[str, tuple[Request, list[int]]]], each_cycle: Callable[[int], None]
) -> list[dict[str, Finished]]:
    """All conversations turn by turn; in each turn the later ones join when the first ones run."""
    outcomes = []
    for each in turns:
        requests = [asked for asked, _ in each.values()]
        outcomes.append(run(engine, requests[:1], joining={2: requests[1:]}, each_cycle=each_cycle))
        for name, (_, text) in each.items():
            assert outcomes[-1][name].tokens == text, f"turn {name}"
    return outcomes


SETTINGS: dict[str, dict[str, Any]] = {
    "checkpoints in plenty": {},
    "pages of 4": {"page_size": 4, **SMALL},
    "two checkpoints": {"checkpoints": 2, **SMALL},
    "little KV": {"max_total_tokens": 184, **SMALL},
}


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        *covering(["qwen3.5"], BUILDS, SETTINGS, together=1),
        *covering(OTHERS, ["EAGLE3", "EAGLE3 chain", "STANDALONE", "NGRAM"], ["little KV"], together=1),
    ],
    indirect=["kind"],
)
def test_conversations_have_the_texts_that_they_have_without_a_cache(
    target: TargetModel, turns: Seq[dict[str, tuple[Request, list[int]]]], name: str, settings: str
) -> None:
    """Prompts in chunks, forks after a common beginning, evictions of KV and of checkpoints, preemptions."""
    engine = BUILDS[name](target, **SETTINGS[settings])
    admit_without_reserve(engine.scheduler)
    outcomes = talk(engine, turns, lambda _: poison_unused(engine))
    cached = [{name: finished.cached_tokens for name, finished in outcome.items()} for outcome in outcomes]
    assert cached[0] == {"0.0": 0, "1.0": 32, "2.0": 32}, "where the conversations depart, to a whole block"
    assert engine.stats().preemptions > 0 or settings != "little KV"
    if settings == "checkpoints in plenty":
        lengths = {name: len(each.prompt_token_ids) for requests in turns for name, (each, _) in requests.items()}
        found = cached[1] | cached[2]
        for at, length in found.items():
            conversation, number = map(int, at.split("."))
            assert length > lengths[f"{conversation}.{number - 1}"] - 32, "the end of the last prompt, or later"
        assert sum(found.values()) > 350, "the ends of answers too"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(pytest.param("qwen3.5", name, marks=deep_unless(name == "EAGLE3")) for name in ("NONE", "EAGLE3", "NGRAM")),
        *(pytest.param(kind, "NGRAM", marks=pytest.mark.deep) for kind in OTHERS),
    ],
    indirect=["kind"],
)
def test_captured_cycles_find_the_same(
    target: TargetModel, turns: Seq[dict[str, tuple[Request, list[int]]]], name: str
) -> None:
    """The next cycle's first forward runs before this one's results are read: states have settled by then."""
    engine = BUILDS[name](target, **as_on_a_gpu(), **SMALL)
    engine.worker.verifier.states.pool.native = None  # type: ignore[union-attr]  # torch computes there
    outcomes = talk(engine, turns, lambda _: None)
    assert min(finished.cached_tokens for finished in outcomes[2].values()) >= 32


def test_a_preempted_request_resumes_from_its_own_checkpoint(target: TargetModel) -> None:
    requests = [request(i, words(40, 70 + i), seed=i, max_tokens=60, ignore_eos=True) for i in range(3)]
    texts = tokens_of(run(plain(target, disable_radix_cache=True), requests))
    engine, resumed = plain(target, max_total_tokens=250), dict[str, int]()
    admit_without_reserve(engine.scheduler)
    preempt, waiting = engine.scheduler._preempt, dict[str, int]()

    def preempted(sequence: Sequence) -> None:
        waiting[sequence.request.request_id] = sequence.num_computed_tokens
        preempt(sequence)

    def poison(_: int) -> None:
        poison_unused(engine)
        for sequence in engine.scheduler.running:
            name = sequence.request.request_id
            if name in waiting:
                resumed[name] = sequence.num_computed_tokens - waiting.pop(name)

    engine.scheduler._preempt = preempted  # type: ignore[method-assign]
    assert tokens_of(run(engine, requests, each_cycle=poison)) == texts
    assert engine.stats().preemptions > 0
    assert max(resumed.values()) >= 0, "its state was not computed again"


@pytest.mark.parametrize("common", [100, 70])
def test_requests_that_wait_for_a_common_beginning_find_its_state(target: TargetModel, common: int) -> None:
    """Copies of a prompt, or prompts that depart where no other checkpoint is: the first one leaves one there."""
    prompts = [words(common, 8) + words(100 - common, 80 + i) for i in range(4)]
    requests = [request(i, prompt, seed=i, temperature=0.7, max_tokens=8) for i, prompt in enumerate(prompts)]
    texts = tokens_of(run(plain(target, disable_radix_cache=True), requests))
    engine = DRAFTERS["EAGLE3"](target, chunked_prefill_size=64)
    outcome = run(engine, requests, each_cycle=lambda _: poison_unused(engine))
    assert tokens_of(outcome) == texts
    cached = [outcome[str(i)].cached_tokens for i in range(4)]
    assert cached == ([0, 96, 96, 96] if common == 100 else [0, 69, 69, 69])


@pytest.mark.parametrize("kind", HYBRIDS, indirect=True)
def test_aborted_requests_leave_checkpoints_that_later_ones_use(target: TargetModel) -> None:
    """One is aborted between the chunks of its prompt, one while it decodes."""
    text = words(90, 5)
    later = request("later", text, max_tokens=20, ignore_eos=True)
    texts = tokens_of(run(plain(target, disable_radix_cache=True), [later]))
    engine = DRAFTERS["EAGLE3"](target, chunked_prefill_size=20, checkpoint_interval=512)
    for name, cycle, length in (("first", 2, 90), ("second", 8, 60)):
        asked = request(name, text[:length], max_tokens=100, ignore_eos=True)

        def abort(at: int, name: str = name, cycle: int = cycle) -> None:
            poison_unused(engine)
            if at == cycle:
                engine.abort(name)

        assert run(engine, [asked], each_cycle=abort)[name].reason == FinishReason.ABORT
    outcome = run(engine, [later], each_cycle=lambda _: poison_unused(engine))
    assert tokens_of(outcome) == texts
    assert outcome["later"].cached_tokens >= 48


def test_events_tell_a_router_what_a_prompt_will_find(
    target: TargetModel, turns: Seq[dict[str, tuple[Request, list[int]]]]
) -> None:
    """The whole blocks before the checkpoint that is hit; more only where a prompt departs between two of them."""
    engine, mirror = plain(target, chunked_prefill_size=24), MirroredBlocks()
    kv = engine.scheduler.kv
    assert kv.radix is not None
    kv.radix.events = BlockEvents(kv.page_size, 16)

    def told(prompt: Seq[int]) -> int:
        mirror.apply(kv.take_events())
        assert mirror.prefixes() == reachable_prefixes(radix, 16)
        ends = [end for end in range(16, len(prompt), 16) if (None, tuple(prompt[:end])) in mirror.prefixes()]
        return max(ends, default=0)

    radix, expected, found = kv.radix, list[int](), list[int]()
    forks = [request(f"fork {i}", words(60, 1) + words(10, i), max_tokens=1) for i in (2, 3, 4)]
    for asked in [*(asked for requests in turns for asked, _ in requests.values()), *forks]:
        expected.append(told(asked.prompt_token_ids))
        found.append(run(engine, [asked])[asked.request_id].cached_tokens)
    talked = [cached // 16 * 16 for cached in found[:-3]]
    assert talked == expected[:-3]
    assert sum(talked) > 300
    assert (expected[-3:], found[-3:]) == ([0, 48, 48], [0, 0, 59]), "the second left a checkpoint where it departs"
    kv.clear()
    assert told(asked.prompt_token_ids) == 0


def test_salts_separate_states(target: TargetModel) -> None:
    engine, text = plain(target), words(50, 6)
    found = [
        run(engine, [request(i, text, max_tokens=3, cache_salt=salt)])[str(i)].cached_tokens
        for i, salt in enumerate([None, "a", None, "a", "b"])
    ]
    assert found == [0, 0, 48, 48, 0]


def test_without_a_prefix_cache_there_are_no_checkpoints(target: TargetModel) -> None:
    engine = plain(target, disable_radix_cache=True)
    states = engine.worker.verifier.states
    assert states is not None
    assert states.pool.states.shape[1] == engine.scheduler.kv.table.rows + 1
    for _ in range(2):
        assert run(engine, [request(0, words(50, 6), max_tokens=3)])["0"].cached_tokens == 0


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    covering(
        # torch computes latent attention
        [("qwen3.5", "EAGLE3"), *((kind, "NGRAM") for kind in HYBRIDS if kind != "kimi")],
        ["float32", "bfloat16"],
        together=1,
    ),
    indirect=["kind"],
)
def test_every_checkpoint_is_the_state_of_its_text_bit_for_bit(
    tmp_path: Path, target: TargetModel, kind: str, name: str, dtype: str
) -> None:
    """With native kernels neither texts nor states depend on chunks, trees, prefix hits and batches."""
    save_checkpoint(target, tmp_path, hybrid_config(VOCABULARY, kind), torch.float32)
    served, alone = (
        load_target(tmp_path, Loading(context=CONTEXT, lookahead=MARGIN, progress=False), dtype=dtype) for _ in range(2)
    )
    assert isinstance(served, TargetModel)
    if not available(torch.device("cpu"), served.config.dtype):
        pytest.skip("there is no compiler")
    histories = {number: words(SYSTEM, 99) for number in range(CONVERSATIONS)}
    if name == "EAGLE3":
        engine = speculative(served, random_head(served, "EAGLE3").to(served.config.dtype), 3, 4, **SMALL)
    else:
        engine = DRAFTERS[name](served, **SMALL)
    for number in range(TURNS):
        requests = [turn(number, conversation, history) for conversation, history in histories.items()]
        texts = {}
        for each in requests:
            texts |= tokens_of(run(plain(alone, disable_radix_cache=True), [each]))
        outcome = run(engine, requests[:1], joining={2: requests[1:]}, each_cycle=lambda _: poison_unused(engine))
        assert tokens_of(outcome) == texts
        histories = {i: [*each.prompt_token_ids, *texts[each.request_id]] for i, each in enumerate(requests)}
    assert sum(finished.cached_tokens for finished in outcome.values()) > 150
    compared = list(checkpoints_of(engine))
    assert len(compared) >= 6
    for tokens, stored in compared:
        reference = plain(alone, disable_radix_cache=True)
        run(reference, [request(0, tokens, max_tokens=1)])
        pool = reference.worker.verifier.states.pool  # type: ignore[union-attr]
        for mine, expected in zip(stored, (pool.states[:, 0], pool.rings[:, 0]), strict=True):
            assert torch.equal(mine, expected), len(tokens)


def checkpoints_of(engine: Engine) -> Iterator[tuple[list[int], tuple[Tensor, Tensor]]]:
    """The text and the state of every checkpoint."""
    radix, pool = engine.scheduler.kv.radix, engine.worker.verifier.states.pool  # type: ignore[union-attr]
    assert radix is not None
    engine.worker.verifier.settle(engine.scheduler.kv.take_moves())  # as the next cycle would
    for node in radix._nodes():
        if node.checkpoint is not None:
            keys = [each.keys for each in radix._path(node)][::-1]
            stored = pool.states[:, node.checkpoint], pool.rings[:, node.checkpoint]
            yield (np.concatenate(keys) >> 32).tolist(), stored
