"""Drafting with the target's own noise: what is drafted, where draft and target agree or differ, and under graphs.

A target whose embeddings are all equal has the same distribution p after every text. So every drafter can be given
q = p, and its best child must be the target's draw at every depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.engine.engine import Engine
from eagle_server.models.drafts.block_edges import EdgeConfig
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops import captured as captured_inputs
from eagle_server.request import Request
from eagle_server.worker.batch.draft_ranking import DraftRanking
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.scenes import as_on_a_gpu, prompt
from tests.support.covering import deep_unless
from tests.support.engines import (
    Finished,
    plain,
    random_block,
    random_head,
    random_target,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.flashinfer_emulation import Emulation
from tests.support.redrafter import random_redrafter
from tests.support.scoring import logits_of
from tests.unit.worker.test_no_host_sync import random_medusa

CHAIN = ((0,), (0, 0), (0, 0, 0))
STEPS = len(CHAIN)
STATIC = {"choices": CHAIN, "nodes": STEPS + 1}
SIZES = (2, 8)  # batch sizes of the captured graphs: a capture takes longer than the requests


@pytest.fixture(scope="module")
def unigram() -> TargetModel:
    target = random_target(vocab=64, std=0.1)
    with torch.no_grad():
        target.embed.copy_(target.embed[:1].expand_as(target.embed).clone())
        target.lm_head.dense_weight().normal_(0.0, 0.5, generator=torch.Generator().manual_seed(5))
    return target


def eagle(target: TargetModel, logits: Tensor, **settings: Any) -> Engine:
    head: Any = random_head(target, "EAGLE3")
    head.logits = lambda normed: logits.expand(len(normed), -1)
    return speculative(target, head, STEPS, 1, **settings)


def static_eagle(target: TargetModel, logits: Tensor, **settings: Any) -> Engine:
    return eagle(target, logits, **STATIC, **settings)


def medusa(target: TargetModel, logits: Tensor, **settings: Any) -> Engine:
    heads: Any = random_medusa(target)
    heads.forward = lambda hidden, count: logits.expand(count, len(hidden), -1)
    return speculative(target, heads, STEPS, 1, **STATIC, **settings)


def redrafter(target: TargetModel, logits: Tensor, **settings: Any) -> Engine:
    head: Any = random_redrafter(target)
    head.logits = lambda context, state: logits.expand(len(state), -1)
    return speculative(target, head, STEPS, 1, **settings)


def standalone(target: TargetModel, logits: Tensor, **settings: Any) -> Engine:
    """The draft is the target itself."""
    return speculative(target, DraftLM(target), STEPS, 1, **settings)


def block(target: TargetModel, logits: Tensor, edges: EdgeConfig | None = None, **settings: Any) -> Engine:
    """Edges add nothing: their last weights are zero."""
    head: Any = random_block(target, edges)
    head.logits = lambda y: logits.expand(len(y), -1)
    if edges is not None:
        head.edges.last_weights.zero_()
    return speculative(target, head, STEPS, 1, **settings)


def block_with_a_selector(target: TargetModel, logits: Tensor, **settings: Any) -> Engine:
    return block(target, logits, EdgeConfig("selector", 6, candidates=16), **settings)


BUILDS: list[Callable[..., Engine]] = [
    *(eagle, static_eagle, medusa, redrafter, standalone, block, block_with_a_selector)
]


def requests(**settings: Any) -> list[Request]:
    """Sampled requests, and a greedy one among them."""
    temperatures = (0.7, 1.0, 0.0, 1.5)
    common = {"max_tokens": 25, "ignore_eos": True, **settings}
    return [request(i, prompt(9 + i, i), seed=i, temperature=t, **common) for i, t in enumerate(temperatures)]


def as_captured() -> dict[str, Any]:
    return as_on_a_gpu(SIZES)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        *(pytest.param(build, dict, id=f"{build.__name__}-eager") for build in BUILDS),
        *(
            pytest.param(build, as_captured, id=f"{build.__name__}-captured", marks=deep_unless(build is eagle))
            for build in BUILDS
        ),
    ],
)
def test_a_draft_that_agrees_with_the_target_guesses_every_draw(
    unigram: TargetModel, build: Callable[..., Engine], settings: Callable[[], dict[str, Any]]
) -> None:
    """Every cycle accepts its whole chain: 24 = 6 * (3 + 1) tokens after the first one."""
    logits = logits_of(unigram, [1, 2, 3])[-1]
    asked = requests()
    outcome = run(build(unigram, logits, **settings()), asked)
    assert tokens_of(outcome) == tokens_of(run(plain(unigram), asked))
    for name, finished in outcome.items():
        assert finished.spec is not None
        assert (finished.spec.cycles, finished.spec.accepted) == (6, 18), name
    uncoupled = run(build(unigram, logits, coupling=False, **settings()), asked)
    assert tokens_of(uncoupled) == tokens_of(outcome)
    sampled = [uncoupled[str(i)].spec for i in (0, 1, 3)]
    assert all(spec is not None and spec.cycles > 8 for spec in sampled)


@pytest.mark.parametrize("build", BUILDS)
def test_drafts_have_the_penalties_of_the_draw(unigram: TargetModel, build: Callable[..., Engine]) -> None:
    """Every first draft is accepted. Later ones may not be: drafts do not count those before them."""
    logits = logits_of(unigram, [1, 2, 3])[-1]
    asked = requests(frequency_penalty=1.5, repetition_penalty=1.4)
    outcome = run(build(unigram, logits), asked)
    assert tokens_of(outcome) == tokens_of(run(plain(unigram), asked))
    assert all(len(set(finished.tokens)) > 10 for finished in outcome.values()), "the greedy one, too"
    histograms = [finished.spec.histogram for finished in outcome.values() if finished.spec is not None]
    assert [histogram[0] for histogram in histograms] == [0] * len(asked)


def drafts_of(outcome: dict[str, Finished]) -> dict[str, Any]:
    return {name: (finished.tokens, finished.spec) for name, finished in outcome.items()}


# Joined trees depend on the calibration, whose sums may round differently in padded batches.
CAPTURED = [name for name, case in CASES.items() if case.stages > 1 and not case.ngrams]


@pytest.mark.parametrize(
    "drafting",
    [pytest.param(name, marks=deep_unless(name == "EAGLE3 chain")) for name in CAPTURED],
    indirect=True,
)
def test_captured_functions_rank_by_the_noise_of_each_cycles_requests(drafting: Drafting) -> None:
    """Requests with other temperatures and keys take the places of others. Stale inputs would draft other tokens."""
    # As captured functions do, both draft all steps near a request's end.
    uncaptured = {**as_captured(), "stand_ins": {"flashinfer": Emulation()}}
    captured, eager = (run_in_turn(drafting.engine(**settings)) for settings in (as_captured(), uncaptured))
    assert drafts_of(captured) == drafts_of(eager)
    uncoupled = run_in_turn(drafting.engine(**as_captured(), coupling=False))
    assert tokens_of(uncoupled) == tokens_of(captured)
    assert drafts_of(uncoupled) != drafts_of(captured)


@pytest.mark.parametrize("drafting", ["EAGLE3 chain"], indirect=True)
def test_noise_that_a_graph_holds_from_its_capture_is_caught(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, copied = run_in_turn(drafting.engine()), captured_inputs._copied
    monkeypatch.setattr(
        captured_inputs, "_copied", lambda value: [] if isinstance(value, DraftRanking) else copied(value)
    )
    captured = run_in_turn(drafting.engine(**as_captured()))
    assert tokens_of(captured) == tokens_of(eager)
    assert drafts_of(captured) != drafts_of(eager)


def run_in_turn(engine: Engine) -> dict[str, Finished]:
    """Four requests, and four more that join while they run."""
    asked = requests()
    late = [request(f"late {each.request_id}", **_other(each)) for each in reversed(asked)]
    return run(engine, asked, joining={3: late[:2], 4: late[2:]})


def _other(each: Request) -> dict[str, Any]:
    sampling = each.sampling
    return {
        "prompt": each.prompt_token_ids[::-1],
        "seed": sampling.seed + 50,
        "temperature": 1.0 if sampling.temperature == 0 else 0.8 * sampling.temperature,
        "max_tokens": 18,
        "ignore_eos": True,
    }
