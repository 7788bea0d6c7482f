"""A failed request loses no page, and changes no other request and no cached prefix."""

from __future__ import annotations

import math

import pytest
import torch

from eagle_server.engine.engine import Engine
from eagle_server.request import FinishReason
from tests.support.engines import plain, random_head, random_target, request, run, speculative, tokens_of

PROMPT = list(range(1, 41))


def engines(page: int) -> list[Engine]:
    target = random_target()
    return [plain(target, page_size=page), speculative(target, random_head(target, "EAGLE3"), page_size=page)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("page", [1, 16])
def test_logits_that_are_not_finite_end_the_request_and_spare_the_prefix_it_shared(page: int, bad: float) -> None:
    for engine in engines(page):
        asked = request("a", PROMPT, ignore_eos=True)
        expected = tokens_of(run(engine, [asked]))
        weight = engine.worker.verifier.target.lm_head.weight
        original = weight.clone()
        with torch.no_grad():
            weight[7] = bad
        failed = run(engine, [request("b", [*PROMPT, 5, 6])])["b"]
        assert failed.reason is FinishReason.ERROR
        assert "not finite" in (failed.error or "")
        assert failed.cached_tokens >= 32
        with torch.no_grad():
            weight.copy_(original)
        again = run(engine, [asked])
        assert tokens_of(again) == expected
        assert again["a"].cached_tokens >= 32


@pytest.mark.parametrize("speculates", [False, True])
def test_a_dead_end_is_the_requests_own_even_where_the_model_gives_single_tokens_minus_infinity(
    speculates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(page=1)[speculates]
    target = engine.worker.verifier.target
    original = target.logits

    def logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        given = original(hidden, out)
        given[..., 9] = -math.inf
        return given

    monkeypatch.setattr(target, "logits", logits)
    after_five = tuple((5, token) for token in (4, 5))  # decided by the text, so that no check at submission finds it
    dead_end = request("a", [*PROMPT, 5], allowed_token_ids=(4, 5), bad_words=after_five)
    outcome = run(engine, [dead_end, request("b", PROMPT, max_tokens=3)])
    assert (outcome["a"].tokens, outcome["a"].reason) == ([], FinishReason.REFUSED)
    assert (outcome["a"].error or "").startswith("no token may follow")
    assert outcome["b"].error is None


def test_an_end_of_sequence_beyond_the_vocabulary_is_never_looked_for() -> None:
    engine = plain(random_target(eos_token_id=5000))
    assert len(run(engine, [request("a", PROMPT, min_tokens=4, max_tokens=8)])["a"].tokens) == 8


def test_more_alternatives_than_the_vocabulary_has_are_all_of_it() -> None:
    finished = run(plain(random_target(vocab=12)), [request("a", [1, 2], logprobs=20, max_tokens=2, ignore_eos=True)])[
        "a"
    ]
    assert [len(entry.top) for entry in finished.logprobs] == [12, 12]


def test_a_tree_wider_than_the_draft_vocabulary_is_refused() -> None:
    target = random_target(vocab=6)
    with pytest.raises(ValueError, match="the head drafts from 6 tokens"):
        speculative(target, random_head(target, "EAGLE3"), steps=2, topk=8)


def test_a_pool_that_holds_no_request_is_refused() -> None:
    with pytest.raises(ValueError, match="hold no request"):
        plain(random_target(), max_total_tokens=8, page_size=16)
