"""Dynamic trees of many shapes and targets of every family: output with speculation equals output without.

`test_every_drafter` tests what all drafters share, and explains why texts can be compared exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from eagle_server.engine.engine import Engine
from tests.lossless.pairs import Pair
from tests.lossless.scenes import SCENES, check, play
from tests.support.engines import plain, random_head, random_target, request, run, speculative, tokens_of
from tests.support.scoring import NEAR_TIE, in_float64, slack

SHAPES = [  # steps, topk, nodes, page size
    (1, 1, 2, 16),
    (1, 4, 5, 1),
    (1, 8, 9, 16),
    (3, 1, 4, 1),
    (3, 4, 2, 1),  # one drafted node of a pool of 36
    (3, 8, 25, 16),
    (6, 1, 7, 16),
    (6, 4, 25, 1),
    (6, 8, 49, 4),
    (3, 4, 37, 16),  # the whole pool
    (6, 8, 5, 4),  # drafting needs more slots than verification
    (8, 1, 9, 5),
]


def played() -> Iterator[Any]:
    """(pair, shape, scene): every shape with both heads. The scenes take turns.

    The gate has every other shape, and EAGLE-3's head only: that of EAGLE is trained for deep tests alone.
    """
    for number, shape in enumerate(SHAPES):
        for head in ("EAGLE", "EAGLE3"):
            quick = head == "EAGLE3" and (number + number // len(SCENES)) % 2 == 0
            marks = () if quick else (pytest.mark.deep,)
            yield pytest.param(head, shape, list(SCENES)[number % len(SCENES)], marks=marks)


@pytest.mark.parametrize(("pair", "shape", "scene"), list(played()), indirect=["pair"], ids=str)
def test_any_dynamic_tree_gives_the_same_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], shape: tuple[int, int, int, int], scene: str
) -> None:
    """`test_every_drafter` runs every drafter in every scene."""
    steps, topk, size, page = shape

    def build(**given: Any) -> Engine:
        settings = {"nodes": size, "page_size": page, "chunked_prefill_size": 5, **given}
        return speculative(pair.target, pair.head, steps, topk, **settings)

    outcome, engines = play(scene, build)
    check(pair.target, outcome, texts, engines)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama multi-head, llama3 rope": {
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral, window 7": {"architectures": ["MistralForCausalLM"], "sliding_window": 7},
    "qwen2, window 5 in one layer": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3, tied": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "use_qk_norm": True,
    },
}


def in_every_family() -> Iterator[Any]:
    """All (family, head, page size). The gate has every family once, and every head with every page size."""
    for number, family in enumerate(FAMILIES):
        for cell, (kind, page) in enumerate((k, p) for k in ("EAGLE", "EAGLE3") for p in (1, 16)):
            yield pytest.param(family, kind, page, marks=() if cell == number % 4 else (pytest.mark.deep,))


@pytest.mark.parametrize(("family", "kind", "page"), list(in_every_family()))
def test_speculation_changes_nothing_in_any_family(family: str, kind: str, page: int) -> None:
    """Untrained heads with a reduced vocabulary. Sliding windows count positions along the path, not slots."""
    target = random_target(48, seed=3, **FAMILIES[family])
    prompts = torch.randint(1, 48, (4, 40), generator=torch.Generator().manual_seed(8)).tolist()
    requests = [
        request(i, each[: 10 * i + 2], seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], ignore_eos=True)
        for i, each in enumerate(prompts)
    ]
    expected = tokens_of(run(plain(target), requests))
    exact = in_float64(target)
    assert min(slack(exact, each, expected[each.request_id]) for each in requests) > NEAR_TIE
    engine = speculative(target, random_head(target, kind, draft_vocab=40), 3, 8, page_size=page)
    assert tokens_of(run(engine, requests)) == expected
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
