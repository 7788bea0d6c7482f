"""Medusa tests beyond `test_every_drafter`: other trees, useful heads, a shared lm_head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.speculation.static_tree import PRESETS, Choices, ranks_of, steps_of, truncated
from tests.lossless import pairs as makers
from tests.lossless.pairs import Pair, Pairs
from tests.lossless.scenes import REQUESTS, check, play
from tests.support.engines import run, speculative, tokens_of

MC_SIM = PRESETS["mc_sim_7b_63"]
TREES: dict[str, Choices] = {
    "vicuna_33b_stage1": PRESETS["vicuna_33b_stage1"],
    "first head": truncated(MC_SIM, 1),
    "chain": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)),
    "one node": ((1,),),
}


@pytest.fixture
def medusa(pairs: Pairs) -> Pair:
    return pairs.pair_of(makers.medusa)


@pytest.fixture
def texts(pairs: Pairs, medusa: Pair) -> dict[str, list[int]]:
    return pairs.texts(medusa)


def engine_of(target: TargetModel, heads: Any, choices: Choices, **settings: Any) -> Engine:
    return speculative(
        target,
        heads,
        steps_of(choices),
        ranks_of(choices),
        choices=choices,
        nodes=len(choices) + 1,
        **settings,
    )


@pytest.mark.parametrize("tree", TREES)
def test_other_trees_give_the_plain_text_too(medusa: Pair, texts: Mapping[str, Sequence[int]], tree: str) -> None:
    outcome, engines = play("batch", lambda **given: engine_of(medusa.target, medusa.head, TREES[tree], **given))
    check(medusa.target, outcome, texts, engines)


def test_deep_trees_accept_more_than_one_head(medusa: Pair) -> None:
    """Cycles accept 0 to 3 tokens, so the heads read the right feature and predict the right positions."""
    engine = engine_of(medusa.target, medusa.head, MC_SIM)
    outcome = run(engine, REQUESTS)
    lengths: list[int] = []
    for finished in outcome.values():
        assert finished.spec is not None
        lengths.extend(depth for depth, count in enumerate(finished.spec.histogram) if count)
    assert {0, 1, 2, 3} <= set(lengths)
    shorter = engine_of(medusa.target, medusa.head, truncated(MC_SIM, 1))
    run(shorter, REQUESTS)
    assert engine.stats().accepted_tokens > shorter.stats().accepted_tokens


def test_shared_lm_head_drafts_too(medusa: Pair, texts: Mapping[str, Sequence[int]], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    assert medusa.draft is not None
    own = load_file(medusa.draft / "medusa_lm_head.safetensors")
    save_file({name: tensor for name, tensor in own.items() if ".linear." in name}, tmp_path / "medusa.safetensors")
    heads = load_draft(tmp_path, medusa.target, Loading(context=256, progress=False))
    assert isinstance(heads, MedusaHeads)
    assert not heads.config.own_lm_heads
    outcome = run(engine_of(medusa.target, heads, MC_SIM), REQUESTS)
    assert tokens_of(outcome) == texts
