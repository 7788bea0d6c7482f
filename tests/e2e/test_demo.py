"""The embedded pair is small and real, and its speculation is fast and exact."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from eagle_server.config import DEMO_TARGET
from eagle_server.request import Request
from tests.e2e.conftest import PROMPTS, README_FLAGS, demo_engine
from tests.support.engines import FIXED_TREES, request, run, tokens_of
from tests.support.scoring import NEAR_TIE, in_float64, slack

MEGABYTE = 10**6


def test_assets_are_at_most_28_megabytes() -> None:
    """The target has 16, four kinds of heads have the rest."""
    files = [path for path in DEMO_TARGET.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 28 * MEGABYTE


def requests(tokenizer: Tokenizer, temperature: float, count: int, max_tokens: int) -> list[Request]:
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS[:count]]
    return [
        request(i, prompt, seed=i, temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(ids)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 2.7), (1.0, 2.0)])
def test_mean_accept_length_on_held_out_prompts(tokenizer: Tokenizer, temperature: float, floor: float) -> None:
    engine = demo_engine(*README_FLAGS, *FIXED_TREES)
    run(engine, requests(tokenizer, temperature, len(PROMPTS), 64))
    totals = engine.stats()
    cycles = totals.drafted_tokens // 12  # a tree of 13 nodes proposes 12
    assert 1 + totals.accepted_tokens / cycles >= floor


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.deep), 1.0])
def test_demo_text_with_speculation_equals_text_without(tokenizer: Tokenizer, temperature: float) -> None:
    """Texts may differ only at near-ties of float32. These are counted, and none is expected here."""
    asked = requests(tokenizer, temperature, 8, 48)
    plain_engine, fast_engine = demo_engine("--speculative-algorithm", "NONE"), demo_engine(*README_FLAGS)
    plain, fast = tokens_of(run(plain_engine, asked)), tokens_of(run(fast_engine, asked))
    departed = [each for each in asked if fast[each.request_id] != plain[each.request_id]]
    assert len(departed) <= 2
    if departed:
        exact = in_float64(plain_engine.worker.verifier.target)
        assert all(slack(exact, each, plain[each.request_id]) < NEAR_TIE for each in departed)


@pytest.mark.slow
def test_greedy_demo_text_is_what_transformers_generates(tokenizer: Tokenizer) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    asked = requests(tokenizer, 0.0, 6, 48)
    ours = tokens_of(run(demo_engine(*README_FLAGS), asked))
    for each in asked:
        prompt = torch.tensor([each.prompt_token_ids])
        with torch.no_grad():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=48,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert ours[each.request_id] == out[0, prompt.shape[1] :].tolist()
