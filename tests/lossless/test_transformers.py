"""Greedy output equals the output of transformers' generate."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_server.request import FinishReason
from tests.lossless.conftest import eagle_is_deep
from tests.lossless.pairs import Pair
from tests.support.engines import request, run, speculative
from tests.support.scoring import NEAR_TIE, in_float64, slack

pytestmark = eagle_is_deep

NEW_TOKENS = 48


@pytest.mark.parametrize(
    ("topk", "page"), [pytest.param(1, 16, marks=pytest.mark.deep), pytest.param(4, 1, marks=pytest.mark.deep), (4, 16)]
)
def test_greedy_output_equals_transformers_generate(pair: Pair, topk: int, page: int) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(pair.directory, dtype=torch.float32)
    exact = in_float64(pair.target)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, 62, (length,), generator=generator).tolist() for length in (1, 9, 16, 37, 70)]
    requests = [request(i, prompt, max_tokens=NEW_TOKENS) for i, prompt in enumerate(prompts)]
    engine = speculative(pair.target, pair.head, 3, topk, page_size=page)
    outcome = run(engine, requests)
    ends = pair.target.config.eos_token_ids
    for each, prompt in zip(requests, prompts, strict=True):
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        written = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
        finished = outcome[each.request_id]
        assert slack(exact, each, written) > NEAR_TIE  # otherwise the outputs may differ
        assert finished.tokens == written
        assert finished.reason is (FinishReason.STOP if written[-1] in ends else FinishReason.LENGTH)
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
