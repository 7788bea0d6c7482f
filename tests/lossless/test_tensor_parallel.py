"""A target that is split over two ranks gives the texts of one rank, with every drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.engine.assembly import assemble
from eagle_server.models.checkpoints.save import save_checkpoint
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.pairs import GEMMA4, Pair, loaded_head
from tests.lossless.scenes import REQUESTS, SCENES, check, play
from tests.support.covering import deep_unless
from tests.support.engines import engine_config, plain, random_config, random_target, request, run, tokens_of
from tests.support.flashinfer_emulation import Emulation
from tests.support.ranks import SplitEngines
from tests.support.scoring import NEAR_TIE, in_float64, slack

QUICK = {"NONE": "alone", "EAGLE3": "batch", "NGRAM": "preempted", "NEXTN": "prefix_hit"}
ON_A_GPU = {"EAGLE3": "preempted", "NEXTN chain": "batch", "STANDALONE": "prefix_hit"}


def played() -> list[Any]:
    """Each drafter with one scene; and some on the flashinfer backend, whose wrappers are emulated."""
    drafters = [name for name in CASES if name != "FROZEN_KV_MTP"]  # reads the target's KV, of which a rank has a part
    scenes = [(name, QUICK.get(name, list(SCENES)[number % len(SCENES)])) for number, name in enumerate(drafters)]
    quick = [pytest.param(*each, None) for each in QUICK.items()]
    deep = [pytest.param(*each, None, marks=pytest.mark.deep) for each in scenes if each[0] not in QUICK]
    emulated = [
        pytest.param(*each, Emulation, marks=deep_unless(each[0] == "NEXTN chain")) for each in ON_A_GPU.items()
    ]
    return [*quick, *deep, *emulated]


def draft_of(pair: Pair, target: Any) -> Any:
    assert target.config.num_heads < pair.target.config.num_heads and not target.is_fused
    return None if pair.draft is None else loaded_head(pair.kind, pair.directory, pair.draft, target)


@pytest.mark.parametrize(("drafting", "scene", "flashinfer"), played(), indirect=["drafting"])
def test_two_ranks_give_the_text_of_one(
    drafting: Drafting, scene: str, flashinfer: type[Emulation] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flashinfer is not None:  # as on a GPU, where all ranks warm up
        monkeypatch.setattr(assemble, "mirrors", lambda _: True)
    pair, backend = drafting.pair, "torch_native" if flashinfer is None else "flashinfer"
    with SplitEngines(pair.directory, 2, flashinfer) as split:
        outcome, engines = play(
            scene,
            lambda **given: split.engine(
                lambda target: draft_of(pair, target),
                engine_config(**{**drafting.case.numbers, "backend": backend, **given}),
            ),
        )
        if drafting.drafts:
            check(pair.target, outcome, drafting.texts, engines)
        else:
            assert tokens_of(outcome) == {name: drafting.texts[name] for name in outcome}


@pytest.mark.parametrize("drafting", ["EAGLE3"], indirect=True)
def test_an_adaptive_budget_and_log_probabilities_are_those_of_one_rank(drafting: Drafting) -> None:
    """The budget follows rank 0's clock. Messages are longer than one block."""
    prompt = list(range(1, 61)) * 3
    asked = [request("long", prompt, logprobs=2, prompt_logprobs=True, ignore_eos=True), *REQUESTS]
    one = run(plain(drafting.pair.target), asked)
    with SplitEngines(drafting.pair.directory, 2) as split:
        config = engine_config(**drafting.case.numbers, adaptive=True, estimating=True, max_running_requests=16)
        two = run(split.engine(lambda target: draft_of(drafting.pair, target), config), asked)
    assert tokens_of(two) == tokens_of(one)
    for found, expected in zip(
        two["long"].prompt_logprobs + two["long"].logprobs,
        one["long"].prompt_logprobs + one["long"].logprobs,
        strict=True,
    ):
        assert found.token_id == expected.token_id
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "family"),
    [
        (3, 3, 2, {}),
        (6, 3, 2, {}),
        (4, 2, 2, {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 6, "sliding_window_pattern": 2}),
        (4, 2, 2, GEMMA4),
        pytest.param(4, 2, 4, {}, marks=pytest.mark.deep),
    ],
)
def test_heads_that_do_not_divide_and_other_families_give_the_text_of_one_rank(
    tmp_path: Path, heads: int, kv_heads: int, ranks: int, family: dict[str, Any]
) -> None:
    sizes = {"vocab": 63, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8, **family}
    target = random_target(**sizes)
    save_checkpoint(target, tmp_path, random_config(**sizes), torch.float32)
    asked = [request(i, range(1 + i, 40), temperature=i / 2, seed=i, ignore_eos=True) for i in range(4)]
    one, exact = tokens_of(run(plain(target), asked)), in_float64(target)
    assert min(slack(exact, each, one[each.request_id]) for each in asked) > NEAR_TIE
    with SplitEngines(tmp_path, ranks) as split:
        two = split.engine(lambda target: None, engine_config(ngram_steps=4, nodes=6))
        assert tokens_of(run(two, asked)) == one
        assert two.stats().drafted_tokens > 0
