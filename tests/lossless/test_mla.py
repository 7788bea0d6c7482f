"""A DeepSeek target with latent KV and its MTP layer as the draft: output with speculation equals output without."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from eagle_server.cache.pool import LatentPool
from eagle_server.config import Config
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.request import DraftTree
from tests.lossless.pairs import Pair, Pairs, nextn
from tests.lossless.scenes import REQUESTS, as_on_a_gpu
from tests.lossless.test_kv import TOLERANCE, busy_engine, worst_cached_slot
from tests.support import deepseek
from tests.support.covering import covering
from tests.support.engines import plain, pools, random_head, request, run, speculative, tokens_of
from tests.support.scoring import NEAR_TIE, in_float64, slack


@pytest.fixture(scope="module")
def mtp_pair(pairs: Pairs) -> Pair:
    """A random target and a briefly trained MTP layer, loaded from one directory."""
    return pairs.pair_of(nextn)


@pytest.mark.parametrize("topk", [1, 4])
def test_both_pools_hold_latents_and_a_trained_layer_is_often_right(pairs: Pairs, mtp_pair: Pair, topk: int) -> None:
    engine = speculative(mtp_pair.target, mtp_pair.head, 3, topk)
    assert tokens_of(run(engine, REQUESTS)) == pairs.texts(mtp_pair)
    assert all(isinstance(pool, LatentPool) for pool in pools(engine))
    stats = engine.stats()
    assert (0.1 if topk == 1 else 0.0) * stats.drafted_tokens < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("topk", [1, 4])
def test_every_cached_slot_holds_the_latents_of_its_tokens(mtp_pair: Pair, topk: int) -> None:
    target_error, draft_error, slots = worst_cached_slot(mtp_pair, busy_engine(mtp_pair, 16, topk))
    assert slots > 100
    assert target_error < TOLERANCE
    assert draft_error < TOLERANCE


FAMILIES = {
    "v2, groups, no compressed queries": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
    "v3, yarn": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
}


@pytest.mark.parametrize(("family", "kind"), covering(FAMILIES, ["NEXTN", "EAGLE3"], together=1))
def test_untrained_heads_change_nothing_either(family: str, kind: str) -> None:
    """An MTP layer, or an EAGLE-3 head with ordinary attention and an ordinary KV pool."""
    target, mtp = deepseek.random_pair(5, num_hidden_layers=3, **FAMILIES[family])
    requests = [
        request(i, each[: 10 * i + 2], seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], ignore_eos=True)
        for i, each in enumerate(torch.randint(1, 62, (4, 40), generator=torch.Generator().manual_seed(8)).tolist())
    ]
    expected = tokens_of(run(plain(target), requests))
    exact = in_float64(target)
    assert min(slack(exact, each, expected[each.request_id]) for each in requests) > NEAR_TIE
    head = mtp.requires_grad_(requires_grad=False) if kind == "NEXTN" else random_head(target, kind)
    engine = speculative(target, head, 3, 8)
    assert tokens_of(run(engine, requests)) == expected
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


def test_nextn_is_served_from_the_targets_directory_alone(pairs: Pairs, mtp_pair: Pair) -> None:
    """From options to text. The automatic tree of this architecture is a chain of three."""
    config = Config.model_validate(
        {
            "model": {"model_path": str(mtp_pair.directory), "context_length": 256},
            "device": {"device": "cpu", "cpu_threads": 1},
            "speculative": {"algorithm": "MTP", "adaptive": "off"},
            "cache": {"max_total_tokens": 2048},
        }
    )
    engine = build_engine(config, progress=False)
    ready = engine.ready()
    assert (ready.speculative_algorithm, ready.num_steps) == ("NEXTN", 3)
    assert tokens_of(run(engine, REQUESTS)) == pairs.texts(mtp_pair)
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize("modes", [("cascade", "cascade"), ("cascade", "per_node")], ids=str)
def test_each_way_to_attend_drafts_the_same_trees(mtp_pair: Pair, modes: tuple[str, str]) -> None:
    """Texts would not show a draft step that reads wrong slots: verification corrects it."""

    def drafted(**settings: Any) -> list[DraftTree]:
        engine = speculative(mtp_pair.target, mtp_pair.head, 4, 3, **settings)
        asked = request("r", list(range(3, 20)), max_tokens=12, temperature=0.0, ignore_eos=True)
        engine.add(msgspec.structs.replace(asked, trees=True))
        return [delta.tree for _ in range(24) for delta in engine.step() if delta.tree is not None]

    expected = drafted()
    trees = drafted(**as_on_a_gpu(()), verify_attention=modes[0], draft_attention=modes[1])
    assert len(expected) > 2
    assert [(t.token_ids, t.parents) for t in trees] == [(t.token_ids, t.parents) for t in expected]
    torch.testing.assert_close([t.scores for t in trees], [t.scores for t in expected], rtol=1e-3, atol=1e-3)
