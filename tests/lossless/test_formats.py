"""Bit-equal texts in every format of the weights: with speculation, in a batch, after preemption, with a prefix hit.

The native kernels sum each row in an order of its own. So no draw is excused here: near-ties are equal too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.models.checkpoints.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.layers import pack_linears
from eagle_server.ops.native import available
from tests.lossless.drafters import CASES
from tests.lossless.pairs import Pair, Pairs
from tests.lossless.scenes import REQUESTS, SCENES, check, play
from tests.support.engines import (
    MARGIN,
    Finished,
    plain,
    random_config,
    random_head,
    random_target,
    request,
    run,
    speculative,
    tokens_of,
)

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.1}  # in log-probability
HEAD_SIZES = (2, 18, 24, 72, 80, 96, 100)  # of which only 80 and 96 are whole vectors on every machine
DRAFTERS = [name for name, case in CASES.items() if name != "NONE" and case.maker.__name__ != "nextn"]
QUICK = {("EAGLE3", "bfloat16"), ("EAGLE3", "int8"), ("EAGLE3", "int4")}

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


@cache
def in_format(pairs: Pairs, maker: Any, name: str) -> Pair:
    """A pair with its weights in this format."""
    pair, chosen = pairs.of(maker), FORMATS[name]
    target = load_target(pair.directory, **chosen, progress=False)
    assert target.is_fused == (pair.kind != "NEXTN")
    if pair.draft is None:
        return replace(pair, target=target)
    draft = load_draft(
        pair.draft,
        target,
        algorithm="STANDALONE" if pair.kind == "STANDALONE" else None,
        context=pair.target.rope.cos.shape[0],
        lookahead=MARGIN,
        target_path=pair.directory,
        progress=False,
        quantization=chosen.get("quantization"),
    )
    return replace(pair, target=target, head=draft)


@cache
def texts_of(pair: Pair) -> dict[str, list[int]]:
    """Each request alone, token by token."""
    texts: dict[str, list[int]] = {}
    for each in REQUESTS:
        texts |= tokens_of(run(plain(pair.target), [each]))
    return texts


@pytest.mark.parametrize(
    ("drafter", "form"),
    [
        pytest.param(drafter, form, marks=() if (drafter, form) in QUICK else pytest.mark.slow)
        for drafter in DRAFTERS
        for form in FORMATS
    ],
)
def test_texts_are_those_of_plain_decoding_alone(pairs: Pairs, drafter: str, form: str) -> None:
    case = CASES[drafter]
    pair = in_format(pairs, case.maker, form)
    texts = texts_of(pair)
    for scene in SCENES:
        outcome, engines = play(scene, lambda **given: case.engine(pair, page_size=4, **given))
        check(pair.target, outcome, texts, engines)
    assert tokens_of(run(plain(pair.target), REQUESTS)) == texts


@pytest.mark.parametrize("form", ["float32", "bfloat16"])  # experts cannot be quantized here
@pytest.mark.parametrize("drafter", ["NEXTN", "NEXTN chain", "NEXTN+NGRAM"])
def test_latent_attention_with_mtp_layers_differs_in_near_ties_at_most(pairs: Pairs, drafter: str, form: str) -> None:
    """torch computes these models, so a row's rounding may depend on the others: a draw may change if two are close."""
    case = CASES[drafter]
    pair = in_format(pairs, case.maker, form)
    prompts = torch.randint(1, 63, (8, 30), generator=torch.Generator().manual_seed(5)).tolist()
    requests = [
        request(i, prompt[: 4 + 3 * i], temperature=0.0, ignore_eos=True, logprobs=2, max_tokens=32)
        for i, prompt in enumerate(prompts)
    ]
    expected: dict[str, Finished] = {}
    for each in requests:
        expected |= run(plain(pair.target), [each])
    engine = case.engine(pair, page_size=4)
    for outcome in (run(engine, requests[:3]) | run(engine, requests[3:]), run(plain(pair.target), requests)):
        for name, found in outcome.items():
            pairs_of_tokens = zip(found.tokens, expected[name].tokens, strict=True)
            differing = next((place for place, (ours, theirs) in enumerate(pairs_of_tokens) if ours != theirs), None)
            if differing is not None:
                (_, first), (_, second) = expected[name].logprobs[differing].top
                assert first - second < NEAR_TIE[form], (name, differing)
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_heads_of_any_even_size_have_the_texts_and_logprobs_of_plain_decoding(
    form: str, size: int, tmp_path: Path
) -> None:
    shape = {"vocab": 64, "hidden": 64, "head_dim": size}
    save_checkpoint(random_target(**shape, seed=size), tmp_path, random_config(**shape), torch.float32)
    target = load_target(tmp_path, **FORMATS[form], progress=False)
    assert target.is_fused
    head = random_head(target, "EAGLE3").to(target.embed.dtype)
    pack_linears(head, FORMATS[form].get("quantization"))
    prompts = torch.randint(1, 64, (6, 40), generator=torch.Generator().manual_seed(size)).tolist()
    requests = [
        request(i, prompt[: 5 + 7 * i], seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], ignore_eos=True, logprobs=3)
        for i, prompt in enumerate(prompts)
    ]
    expected: dict[str, Finished] = {}
    for each in requests:
        expected |= run(plain(target), [each])
    engine = speculative(target, head, 3, 4)
    drafted = run(engine, requests[:2]) | run(engine, requests[2:])
    for outcome in (drafted, run(plain(target), requests)):
        assert tokens_of(outcome) == tokens_of(expected)
        assert all(outcome[name].logprobs == expected[name].logprobs for name in expected)
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
