"""Medusa's static trees change nothing: the text is that of plain decoding, greedy and seeded, for every tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.engine.engine import Engine
from eagle_server.models.load_draft import load_draft
from eagle_server.models.loader import load_target
from eagle_server.models.medusa_head import MedusaHeads
from eagle_server.models.target import TargetModel
from eagle_server.speculation.medusa_choices import PRESETS, Choices, depth_of, ranks_of, truncated
from eagle_server.training.tiny import tiny_medusa, tiny_pair
from tests.lossless.conftest import Pair
from tests.lossless.test_equality import REQUESTS, SCENES, departure
from tests.lossless.test_flashinfer import SIZES, as_on_a_gpu
from tests.support.engines import plain, run, speculative, tokens_of
from tests.support.scoring import NEAR_TIE, in_float64, slack

TREES: dict[str, Choices] = {
    "mc_sim_7b_63": PRESETS["mc_sim_7b_63"],
    "vicuna_33b_stage1": PRESETS["vicuna_33b_stage1"],
    "first head": truncated(PRESETS["mc_sim_7b_63"], 1),
    "chain": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)),
    "unsorted": ((3,), (0, 0), (0,), (3, 1), (1,), (0, 0, 2)),
    "one node": ((1,),),
}


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("medusa")
    files = tiny_pair(directory, kind="eagle", steps=0)
    tiny_medusa(load_target(files.target, dtype="float32", progress=False, pack=False), directory / "heads")
    target = load_target(files.target, dtype="float32", progress=False)
    draft = load_draft(directory / "heads", target, context=target.rope.cos.shape[0], progress=False)
    assert draft.kind == "MEDUSA"
    return Pair(draft.kind, files.target, target, draft.head)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def texts(medusa: Pair) -> dict[str, list[int]]:
    """The plain outputs; none of their draws is a near-tie."""
    outcome = run(plain(medusa.target), REQUESTS)
    exact = in_float64(medusa.target)
    assert min(slack(exact, each, outcome[each.request_id].tokens) for each in REQUESTS) > NEAR_TIE
    return tokens_of(outcome)


def engine_of(target: TargetModel, heads: Any, choices: Choices, **settings: Any) -> Engine:
    return speculative(
        target,
        heads,
        depth_of(choices),
        ranks_of(choices),
        choices=choices,
        draft_token_num=len(choices) + 1,
        **settings,
    )


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("tree", TREES)
def test_output_with_medusa_equals_plain_output(
    medusa: Pair, texts: Mapping[str, Sequence[int]], tree: str, page: int, scene: str
) -> None:
    engines: list[Engine] = []

    def build(**settings: Any) -> Engine:
        engines.append(engine_of(medusa.target, medusa.head, TREES[tree], page_size=page, **settings))
        return engines[-1]

    outcome = SCENES[scene](build)
    for name, finished in outcome.items():
        assert finished.tokens == texts[name], departure(medusa, name, texts[name], finished.tokens)
    totals = [engine.stats() for engine in engines]
    drafted, accepted = sum(t.drafted_tokens for t in totals), sum(t.accepted_tokens for t in totals)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("modes", ["mask", "cascade"])
@pytest.mark.parametrize("tree", ["mc_sim_7b_63", "unsorted"])
def test_captured_cycles_on_flashinfer_give_the_plain_text(
    medusa: Pair, texts: Mapping[str, Sequence[int]], tree: str, modes: str, scene: str
) -> None:
    engines: list[Engine] = []

    def build(**settings: Any) -> Engine:
        modes_of = {"verify_attention": modes, "draft_attention": modes}
        engines.append(engine_of(medusa.target, medusa.head, TREES[tree], **as_on_a_gpu(), **modes_of, **settings))
        return engines[-1]

    outcome = SCENES[scene](build)
    for name, finished in outcome.items():
        assert finished.tokens == texts[name], departure(medusa, name, texts[name], finished.tokens)
    totals = [engine.stats() for engine in engines]
    assert 0 < sum(t.accepted_tokens for t in totals) < sum(t.drafted_tokens for t in totals)
    assert len(engines[0].worker.verifier.graphs.keys) == 2 * len(SIZES), "propose and verify for each size"


def test_heads_are_worth_more_than_one_guess(medusa: Pair) -> None:
    """Every depth of the tree is accepted at times: the heads read the right feature and guess the right positions."""
    engine = engine_of(medusa.target, medusa.head, TREES["mc_sim_7b_63"])
    outcome = run(engine, REQUESTS)
    lengths: list[int] = []
    for finished in outcome.values():
        assert finished.spec is not None
        lengths.extend(depth for depth, count in enumerate(finished.spec.histogram) if count)
    assert {0, 1, 2, 3} <= set(lengths)
    shorter = engine_of(medusa.target, medusa.head, truncated(TREES["mc_sim_7b_63"], 1))
    run(shorter, REQUESTS)
    assert engine.stats().accepted_tokens > shorter.stats().accepted_tokens


def test_shared_lm_head_drafts_too(medusa: Pair, texts: Mapping[str, Sequence[int]], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    own = load_file(medusa.directory.parent / "heads" / "medusa_lm_head.safetensors")
    save_file({name: tensor for name, tensor in own.items() if ".linear." in name}, tmp_path / "medusa.safetensors")
    heads = load_draft(tmp_path, medusa.target, context=256, progress=False).head
    assert isinstance(heads, MedusaHeads)
    assert not heads.config.own_lm_heads
    outcome = run(engine_of(medusa.target, heads, TREES["mc_sim_7b_63"]), REQUESTS)
    assert tokens_of(outcome) == texts
