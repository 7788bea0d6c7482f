"""Bit-equal texts in every format of the weights: with speculation, in a batch, after preemption, with a prefix hit.

The native kernels sum each row in an order of its own. So no draw is excused here: near-ties are equal too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import DtypeName, load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.drafts.mtp import MtpConfig, MtpHead
from eagle_server.models.layers import pack_linears
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.library import available
from tests.lossless import pairs as pairs_module
from tests.lossless.drafters import CASES as DRAFTING
from tests.lossless.drafters import Case
from tests.lossless.pairs import GEMMA4, Pair, Pairs
from tests.lossless.scenes import REQUESTS, SCENES, as_on_a_gpu, check, play
from tests.support.engines import (
    CONTEXT,
    MARGIN,
    Finished,
    plain,
    random_config,
    random_head,
    random_target,
    randomized,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.hybrids import hybrid_config, hybrid_target
from tests.support.scoring import NEAR_TIE as SLACK
from tests.support.scoring import in_float64, slack

FORMATS: dict[str, tuple[DtypeName, Quantization | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("float32", "int4"),
}
HEAD_SIZES = (2, 18, 24, 72, 80, 96, 100)  # of which only 80 and 96 are whole vectors on every machine
MOE = "EAGLE3 over Qwen3-MoE"
CASES = {**DRAFTING, MOE: Case(pairs_module.eagle3_moe, 3, 4)}
DRAFTERS = [name for name in CASES if name != "NONE"]
QUICK = {
    ("EAGLE3", "bfloat16"),
    ("EAGLE3", "int8"),
    (MOE, "float32"),
    (MOE, "int4"),
    ("NEXTN of GLM", "bfloat16"),
    ("NEXTN", "bfloat16"),
    ("DFLASH", "int8"),
    ("DFLASH 2", "int4"),
    ("PEAGLE", "bfloat16"),
    ("PEAGLE", "int8"),
}

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


@cache
def in_format(pairs: Pairs, maker: Any, name: str) -> Pair:
    """A pair with its weights in this format."""
    pair, (dtype, rounding) = pairs.pair_of(maker), FORMATS[name]
    target = load_target(pair.directory, Loading(progress=False, quantization=rounding), dtype=dtype)
    assert target.is_fused
    if pair.draft is None:
        return replace(pair, target=target)
    draft = load_draft(
        pair.draft,
        target,
        Loading(
            context=pair.target.rope.cos.shape[0],
            lookahead=MARGIN,
            progress=False,
            quantization=rounding,
        ),
        algorithm="STANDALONE" if pair.kind == "STANDALONE" else None,
        target_path=pair.directory,
    )
    return replace(pair, target=target, head=draft)


@cache
def texts_of(pair: Pair) -> dict[str, list[int]]:
    """Each request alone, token by token."""
    texts: dict[str, list[int]] = {}
    for each in REQUESTS:
        texts |= tokens_of(run(plain(pair.target), [each]))
    return texts


def played() -> Iterator[Any]:
    """(drafter, format, scene): each drafter in all formats and scenes, each format in all scenes."""
    for (number, drafter), (place, form) in itertools.product(enumerate(DRAFTERS), enumerate(FORMATS)):
        scene = list(SCENES)[(number + place) % len(SCENES)]
        yield pytest.param(drafter, form, scene, marks=() if (drafter, form) in QUICK else pytest.mark.deep)


@pytest.mark.parametrize(("drafter", "form", "scene"), list(played()))
def test_texts_are_those_of_plain_decoding_alone(pairs: Pairs, drafter: str, form: str, scene: str) -> None:
    case = CASES[drafter]
    pair = in_format(pairs, case.maker, form)
    texts = texts_of(pair)
    outcome, engines = play(scene, lambda **given: case.engine(pair, page_size=4, **given))
    check(pair.target, outcome, texts, engines)
    assert tokens_of(run(plain(pair.target), REQUESTS)) == texts


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_heads_of_any_even_size_have_the_texts_and_logprobs_of_plain_decoding(
    form: str, size: int, tmp_path: Path
) -> None:
    shape = {"vocab": 64, "hidden": 64, "head_dim": size}
    save_checkpoint(random_target(**shape, seed=size), tmp_path, random_config(**shape), torch.float32)
    check_against_plain_decoding(tmp_path, form, seed=size)


FAMILIES = {
    "Gemma3ForCausalLM": {
        **{"head_dim": 24, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
        **{"rope_local_base_freq": 300.0, "rope_theta": 9000.0},
    },
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForCausalLM with experts": {
        **GEMMA4,
        **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40},
    },
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_layers_of_two_kinds_have_the_texts_and_logprobs_of_plain_decoding(
    form: str, family: str, tmp_path: Path
) -> None:
    shape = {"vocab": 64, "hidden": 64, "architectures": [family.partition(" ")[0]], **FAMILIES[family]}
    save_checkpoint(random_target(**shape, seed=3), tmp_path, random_config(**shape), torch.float32)
    check_against_plain_decoding(tmp_path, form, seed=3)


HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3.5": {},
    "Qwen3-Next": {
        **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 5},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20},
        **{"linear_key_head_dim": 10, "linear_value_head_dim": 6},
    },
    "LFM2": {"kind": "lfm2"},
    "LFM2-MoE": {
        **{"kind": "lfm2", "architectures": ["Lfm2MoeForCausalLM"], "num_dense_layers": 1, "conv_bias": True},
        **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    },
    "Granite 4": {"kind": "granite"},
    "Granite 4 with experts": {"kind": "granite", "num_local_experts": 5, "intermediate_size": 20},
    "Nemotron-H": {"kind": "nemotron"},
    "Nemotron-H with narrow experts": {"kind": "nemotron", "moe_latent_size": 24},
    "Bamba": {"kind": "bamba"},
    "Kimi Linear": {"kind": "kimi"},
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_have_the_texts_and_logprobs_of_plain_decoding(form: str, family: str, tmp_path: Path) -> None:
    given = HYBRIDS[family]
    save_checkpoint(hybrid_target(64, seed=3, **given), tmp_path, hybrid_config(64, **given), torch.float32)
    check_against_plain_decoding(tmp_path, form, seed=3)


@pytest.mark.parametrize("form", ["bfloat16", "int4"])
@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3-Next"])
def test_mtp_layers_of_hybrids_draft_natively_and_keep_the_texts(form: str, family: str, tmp_path: Path) -> None:
    """Alone, with chunked prompts, and with so little KV that some are preempted."""
    given, vocab = HYBRIDS[family], 12
    save_checkpoint(hybrid_target(vocab, seed=3, **given), tmp_path, hybrid_config(vocab, **given), torch.float32)
    dtype, rounding = FORMATS[form]
    how = Loading(context=CONTEXT, lookahead=MARGIN, progress=False, quantization=rounding)
    target: Any = load_target(tmp_path, how, dtype=dtype)
    config, shared = MtpConfig.of(target.config, target.config.num_layers), TargetWeights(target.embed, target.lm_head)
    head = randomized(MtpHead(config, CONTEXT + MARGIN, shared), 1, 0.25).to(target.embed.dtype)
    pack_linears(head, rounding)
    assert head.native_weights() is not None
    prompts = torch.randint(1, vocab, (5, 41), generator=torch.Generator().manual_seed(1)).tolist()
    requests = [
        request(i, prompt[: 5 + 9 * i], seed=i, temperature=0.7 * (i % 2), ignore_eos=True, max_tokens=24)
        for i, prompt in enumerate(prompts)
    ]
    texts: dict[str, list[int]] = {}
    for each in requests:
        texts |= tokens_of(run(plain(target), [each]))
    for settings in ({}, {"chunked_prefill_size": 16}, {"max_total_tokens": 240}):
        engine = speculative(target, head, 3, 4, **settings)
        assert tokens_of(run(engine, requests[:2], joining={2: requests[2:]})) == texts
        assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_layers_of_two_kinds_have_the_text_of_a_cpu_on_flashinfer(family: str, tmp_path: Path) -> None:
    """With emulated wrappers and graphs. torch computes the norms and products."""
    shape = {"vocab": 64, "hidden": 64, "architectures": [family.partition(" ")[0]], **FAMILIES[family]}
    target = random_target(**shape, seed=3)
    prompts = torch.randint(1, 64, (4, 40), generator=torch.Generator().manual_seed(3)).tolist()
    requests = [
        request(i, prompt[: 5 + 9 * i], seed=i, temperature=i % 2, ignore_eos=True) for i, prompt in enumerate(prompts)
    ]
    texts, exact = tokens_of(run(plain(target), requests)), in_float64(target)
    assert min(slack(exact, each, texts[each.request_id]) for each in requests) > SLACK
    engine = speculative(target, random_head(target, "EAGLE3"), 3, 4, **as_on_a_gpu())
    assert tokens_of(run(engine, requests)) == texts
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


def check_against_plain_decoding(directory: Path, form: str, *, seed: int) -> None:
    """An untrained EAGLE-3 head's trees, alone and in batches, for the target in this directory."""
    dtype, rounding = FORMATS[form]
    target = load_target(directory, Loading(context=CONTEXT, progress=False, quantization=rounding), dtype=dtype)
    assert target.is_fused == target.config.has_family and target.lm_head.native is not None
    head = random_head(target, "EAGLE3").to(target.embed.dtype)  # type: ignore[arg-type]
    pack_linears(head, rounding)
    prompts = torch.randint(1, 64, (4, 40), generator=torch.Generator().manual_seed(seed)).tolist()
    requests = [
        request(i, prompt[: 5 + 11 * i], seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], ignore_eos=True, logprobs=3)
        for i, prompt in enumerate(prompts)
    ]
    expected: dict[str, Finished] = {}
    undrafted = plain(target)
    for each in requests:
        expected |= run(undrafted, [each])
    engine = speculative(target, head, 3, 4)
    drafted = run(engine, requests[:2]) | run(engine, requests[2:])
    for outcome in (drafted, run(plain(target), requests)):
        assert tokens_of(outcome) == tokens_of(expected)
        assert all(outcome[name].logprobs == expected[name].logprobs for name in expected)
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
