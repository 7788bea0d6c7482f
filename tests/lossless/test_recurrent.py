"""Targets with recurrent layers: every way of drafting gives the plain text, and the plain text is transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from eagle_server.engine.assembly.assemble import Surroundings, assemble
from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.drafts.mtp import MtpConfig, MtpHead
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.recurrent import kernels as recurrent_kernels
from eagle_server.request import FinishReason, Request
from tests.lossless.scenes import as_on_a_gpu
from tests.parity.checkpoints import CASES, VOCAB, write
from tests.support.engines import (
    CONTEXT,
    MARGIN,
    admit_without_reserve,
    engine_config,
    plain,
    random_block,
    random_head,
    random_target,
    randomized,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.hybrids import hybrid_config, hybrid_target
from tests.support.kernels import needs_triton
from tests.support.launches import launch_kernels, launched
from tests.support.scoring import NEAR_TIE, in_float64, slack

VOCABULARY = 12  # few tokens, so that untrained drafts are accepted now and then
REQUESTS = [
    request(
        i,
        torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(i)).tolist(),
        temperature=(0.0, 0.8)[i % 2],
        seed=i,
        max_tokens=20 + i,
        ignore_eos=True,
    )
    for i, length in enumerate([41, 7, 90, 1, 33, 2])
]
Drafted = Callable[..., Engine]


def head(kind: str, steps: int, topk: int) -> Drafted:
    return lambda target, **given: speculative(target, random_head(target, kind), steps, topk, **given)


def mtp(target: TargetModel, **given: Any) -> Engine:
    """Qwen3.5's own MTP layer: it attends, and only the target has states."""
    shared = TargetWeights(target.embed, target.lm_head)
    layer = MtpHead(MtpConfig.of(target.config, target.config.num_layers), CONTEXT + MARGIN, shared)
    return speculative(target, randomized(layer, 1, 0.25), 3, 4, **given)


def model(target: TargetModel, **given: Any) -> Engine:
    return speculative(target, DraftLM(random_target(VOCABULARY)), 3, 2, **given)


def ngrams(target: TargetModel, **given: Any) -> Engine:
    stand_ins = given.pop("stand_ins", {})
    return assemble(target, None, engine_config(nodes=9, ngram_steps=5, **given), Surroundings(**stand_ins))


def block(target: TargetModel, **given: Any) -> Engine:
    return speculative(target, random_block(target), 4, 3, **given)


DRAFTERS: dict[str, Drafted] = {
    "EAGLE chain": head("EAGLE", 4, 1),
    "EAGLE3": head("EAGLE3", 3, 4),
    "EAGLE3 chain": head("EAGLE3", 4, 1),
    "NEXTN": mtp,
    "DFLASH": block,
    "STANDALONE": model,
    "NGRAM": ngrams,
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return hybrid_target(VOCABULARY)


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> dict[str, list[int]]:
    """Plain texts. None of their draws is a near-tie."""
    found, exact = tokens_of(run(plain(target), REQUESTS)), in_float64(target)
    assert min(slack(exact, each, found[each.request_id]) for each in REQUESTS) > NEAR_TIE
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_gives_the_plain_text(target: TargetModel, texts: dict[str, list[int]], name: str) -> None:
    """Alone, then in a batch with chunked prompts that others join, then with so little KV that some are preempted."""
    build = DRAFTERS[name]
    engine = build(target)
    for each in REQUESTS[:3]:
        assert tokens_of(run(engine, [each])) == {each.request_id: texts[each.request_id]}
    for settings in ({"chunked_prefill_size": 16}, {"max_total_tokens": 240}):
        engine = build(target, **settings)
        admit_without_reserve(engine.scheduler)
        again = [run(engine, REQUESTS[:3], joining={2: REQUESTS[3:4], 4: REQUESTS[4:]}) for _ in range(2)]
        assert [tokens_of(outcome) for outcome in again] == [texts, texts]
        assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
        assert (engine.stats().preemptions > 0) == ("max_total_tokens" in settings)


@pytest.mark.parametrize("name", ["EAGLE chain", "EAGLE3", "NEXTN", "NGRAM"])
def test_captured_cycles_give_the_plain_text(target: TargetModel, texts: dict[str, list[int]], name: str) -> None:
    """Batches are padded, and the next cycle's first forward runs before this one's results are read."""
    engine = DRAFTERS[name](target, **as_on_a_gpu(), chunked_prefill_size=16)
    outcome = run(engine, REQUESTS[:2], joining={3: REQUESTS[2:4], 5: REQUESTS[4:]})
    assert tokens_of(outcome) == texts
    assert engine.stats().accepted_tokens > 0


@needs_triton
@pytest.mark.deep
@pytest.mark.parametrize("name", ["EAGLE3", "NGRAM"])
def test_the_kernels_for_gpus_give_the_plain_text(
    target: TargetModel, texts: dict[str, list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter: padded batches of trees of one size, and trees of several sizes; then prefix hits."""
    engine = DRAFTERS[name](target, **(as_on_a_gpu() if name == "EAGLE3" else {}))
    states = engine.worker.verifier.states
    assert states is not None
    states.pool.native = None
    launch_kernels(monkeypatch, recurrent_kernels)
    asked, calls = [with_tokens(each, 9) for each in REQUESTS[:3]], launched(monkeypatch)
    for _ in range(2):
        outcome = run(engine, asked[:2], joining={2: asked[2:]})
        assert tokens_of(outcome) == {each.request_id: texts[each.request_id][:9] for each in asked}
    assert {call.split()[0] for call in calls} == {"_tree_kernel", "_keep_kernel"}
    assert engine.stats().accepted_tokens > 0


def with_tokens(asked: Request, count: int) -> Request:
    return msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, max_tokens=count))


def test_a_forward_computed_ahead_changes_no_text(target: TargetModel, texts: dict[str, list[int]]) -> None:
    """Without drafts the verify forward of the next cycle runs ahead; those that join or end make it void."""
    engine = plain(target, **as_on_a_gpu())
    assert tokens_of(run(engine, REQUESTS[:2], joining={4: REQUESTS[2:4], 9: REQUESTS[4:]})) == texts


def test_an_aborted_request_leaves_nothing_to_the_next_one(target: TargetModel, texts: dict[str, list[int]]) -> None:
    engine = plain(target, max_running_requests=1)
    abort = {6: REQUESTS[2].request_id}
    joining = {2: [REQUESTS[0]]}
    outcome = run(engine, [REQUESTS[2]], joining=joining, each_cycle=lambda n: n in abort and engine.abort(abort[n]))
    assert outcome["2"].reason == FinishReason.ABORT
    assert outcome["0"].tokens == texts["0"]


def test_what_is_not_served_with_states_is_refused_by_name(tmp_path: Path, target: TargetModel) -> None:
    save_checkpoint(target, tmp_path, hybrid_config(VOCABULARY), torch.float32)
    with pytest.raises(ValueError, match="recurrent layers: it can be a target, but a draft model must have keys"):
        load_draft(tmp_path, target, Loading(context=64, lookahead=9, progress=False), algorithm="STANDALONE")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "qwen3.5",
            "qwen3.5-odd-sizes-tied",
            "qwen3.5-moe",
            "qwen3-next",
            "granite-hybrid",
            "bamba",
            "nemotron-h-experts",
        ),
        *("granite-hybrid-experts-rope-tied", "falcon-h1", "falcon-h1-norm-biases", "lfm2", "lfm2-moe", "kimi-linear"),
    ],
)
def test_greedy_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = write(CASES[name], tmp_path)
    engine = ngrams(load_target(tmp_path, Loading(lookahead=16, progress=False), dtype="float32"), context_length=64)
    prompts = [torch.randint(VOCAB, (1, n), generator=torch.Generator().manual_seed(n)) for n in (3, 21)]
    requests = [request(i, prompt[0].tolist(), max_tokens=25, ignore_eos=True) for i, prompt in enumerate(prompts)]
    found = tokens_of(run(engine, requests))
    for i, prompt in enumerate(prompts):
        expected = theirs.generate(prompt, max_new_tokens=25, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
        assert found[str(i)] == expected.tolist()
