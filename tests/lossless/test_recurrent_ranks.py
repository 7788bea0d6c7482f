"""Recurrent layers that are split over two ranks, each with its share of the heads and their states: the texts of one.

Rank 0 has the requests and the prefix cache. The other is told which states move, are saved and are restored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.engine.assembly import assemble
from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.drafts.mtp import MtpConfig, MtpHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.request import FinishReason
from tests.lossless.test_recurrent import REQUESTS, VOCABULARY, target, texts
from tests.lossless.test_recurrent_prefixes import SETTINGS, poison_unused, talk, turns, words
from tests.support.covering import covering, deep_unless
from tests.support.engines import (
    CONTEXT,
    MARGIN,
    admit_without_reserve,
    engine_config,
    plain,
    random_head,
    randomized,
    request,
    run,
    tokens_of,
    tree_size,
)
from tests.support.flashinfer_emulation import Emulation
from tests.support.hybrids import hybrid_config, hybrid_target
from tests.support.ranks import SplitEngines

__all__ = ["target", "texts", "turns"]  # fixtures
Build = Callable[..., Engine]


def mtp(whole: TargetModel) -> MtpHead:
    shared = TargetWeights(whole.embed, whole.lm_head)
    layers = MtpConfig.of(whole.config, whole.config.num_layers)
    head: MtpHead = randomized(MtpHead(layers, CONTEXT + MARGIN, shared), 1, 0.25)
    return head


def tree(steps: int, topk: int) -> dict[str, Any]:
    return {"model_steps": steps, "topk": topk, "nodes": tree_size(steps, topk)}


DRAFTS: dict[str, tuple[Callable[[TargetModel], Any], dict[str, Any]]] = {
    "NONE": (lambda _: None, {}),
    "NGRAM": (lambda _: None, {"nodes": 9, "ngram_steps": 5}),
    "EAGLE chain": (lambda whole: random_head(whole, "EAGLE"), tree(4, 1)),
    "EAGLE3": (lambda whole: random_head(whole, "EAGLE3"), tree(3, 4)),
    "NEXTN": (mtp, tree(3, 4)),
}


@pytest.fixture
def build(tmp_path: Path, target: TargetModel, request: pytest.FixtureRequest) -> Any:
    """Makes engines over the split target, with the drafter that the test names."""
    name = request.node.callspec.params["name"]
    save_checkpoint(
        target, tmp_path, hybrid_config(VOCABULARY, max_position_embeddings=CONTEXT + MARGIN), torch.float32
    )
    draft, numbers = DRAFTS[name]

    def made(split: SplitEngines, **settings: Any) -> Engine:
        def drafted(share: TargetModel) -> Any:
            recurrent, whole = share.config.recurrent, target.config.recurrent
            assert recurrent is not None
            assert whole is not None
            assert recurrent.channels * 2 == whole.channels
            return draft(target)

        return split.engine(drafted, engine_config(**{**numbers, **settings}))

    return lambda **stand_in: (SplitEngines(tmp_path, 2, **stand_in), made)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=deep_unless(name in ("NGRAM", "EAGLE3"))) for name in DRAFTS]
)
def test_two_ranks_give_the_text_of_one(build: Any, texts: dict[str, list[int]], name: str) -> None:
    """Chunked prompts that join others, and so little KV that some are preempted. Twice, so that prompts are cached."""
    splits, made = build()
    with splits as split:
        for settings in ({"chunked_prefill_size": 16}, {"max_total_tokens": 240}):
            engine = made(split, **settings)
            admit_without_reserve(engine.scheduler)
            for _ in range(2):
                outcome = run(engine, REQUESTS[:3], joining={2: REQUESTS[3:4], 4: REQUESTS[4:]})
                assert tokens_of(outcome) == texts
            stats = engine.stats()
            assert 0 < stats.accepted_tokens < stats.drafted_tokens or name == "NONE"
            assert (stats.preemptions > 0) == ("max_total_tokens" in settings)
            assert outcome["0"].cached_tokens > 0 or "max_total_tokens" in settings


@pytest.mark.parametrize(
    ("name", "settings"),
    covering(["NONE", "EAGLE3", "NGRAM"], ["checkpoints in plenty", "two checkpoints", "little KV"], together=1),
)
def test_conversations_find_their_states_on_both_ranks(build: Any, turns: Any, name: str, settings: str) -> None:
    splits, made = build()
    with splits as split:
        engine = made(split, **SETTINGS[settings])
        admit_without_reserve(engine.scheduler)
        outcomes = talk(engine, turns, lambda _: poison_unused(engine))
    assert outcomes[0]["1.0"].cached_tokens == outcomes[0]["2.0"].cached_tokens == 32
    assert engine.stats().preemptions > 0 or settings != "little KV"
    assert sum(each.cached_tokens for each in outcomes[2].values()) > 100 or settings != "checkpoints in plenty"


@pytest.mark.parametrize("name", ["EAGLE3", pytest.param("NGRAM", marks=pytest.mark.deep)])
def test_on_the_flashinfer_backend_all_ranks_warm_up(
    build: Any, texts: dict[str, list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "mirrors", lambda _: True)
    splits, made = build(flashinfer=Emulation)
    with splits as split:
        engine = made(split, backend="flashinfer", chunked_prefill_size=16, max_running_requests=8)
        outcome = run(engine, REQUESTS[:2], joining={3: REQUESTS[2:4], 5: REQUESTS[4:]})
    assert tokens_of(outcome) == texts


@pytest.mark.parametrize("name", ["EAGLE3"])
def test_aborted_requests_leave_checkpoints_on_both_ranks(build: Any, target: TargetModel, name: str) -> None:
    """One is aborted between the chunks of its prompt, one while it decodes."""
    text = words(90, 5)
    later = request("later", text, max_tokens=20, ignore_eos=True)
    expected = tokens_of(run(plain(target, disable_radix_cache=True), [later]))
    splits, made = build()
    with splits as split:
        engine = made(split, chunked_prefill_size=20, checkpoint_interval=512)
        for who, cycle, length in (("first", 2, 90), ("second", 8, 60)):
            asked = request(who, text[:length], max_tokens=100, ignore_eos=True)

            def abort(at: int, who: str = who, cycle: int = cycle) -> None:
                if at == cycle:
                    engine.abort(who)

            assert run(engine, [asked], each_cycle=abort)[who].reason == FinishReason.ABORT
        outcome = run(engine, [later])
    assert tokens_of(outcome) == expected
    assert outcome["later"].cached_tokens >= 48


def test_key_heads_that_do_not_divide_are_whole_on_every_rank(tmp_path: Path) -> None:
    """Three ranks: neither two key heads nor four heads divide, so only the MLPs and the vocabulary are split."""
    sizes = {"intermediate_size": 48}
    whole = hybrid_target(VOCABULARY, **sizes)
    save_checkpoint(whole, tmp_path, hybrid_config(VOCABULARY, **sizes), torch.float32)
    expected = tokens_of(run(plain(whole), REQUESTS[:3]))
    with SplitEngines(tmp_path, 3) as split:

        def check(share: TargetModel) -> None:
            assert share.config.recurrent == whole.config.recurrent
            assert share.config.intermediate_size == 16

        engine = split.engine(check, engine_config(nodes=6, ngram_steps=4))
        assert tokens_of(run(engine, REQUESTS[:3])) == expected
