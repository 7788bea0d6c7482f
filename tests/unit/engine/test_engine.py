"""The engine's behaviour for single requests: refusals, failures, aborts, and the limits of context and pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eagle_server.engine.engine import Engine
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.request import FinishReason
from tests.support.engines import (
    CONTEXT,
    plain,
    random_head,
    random_target,
    request,
    run,
    speculative,
    tokens_of,
    tree_size,
)

VOCAB, BROKEN = 24, 23


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """A target that returns NaN for every position after token 23. No head drafts this token."""
    model = random_target(VOCAB, hidden=16)
    model.embed[BROKEN] = float("nan")
    model.lm_head.weight[BROKEN] = 0  # so that it is rarely drawn
    return model


@pytest.fixture(params=["NONE", "EAGLE", "EAGLE3"])
def engine(request: pytest.FixtureRequest, target: TargetModel) -> Engine:
    return build(target, request.param)


def build(target: TargetModel, kind: str, **settings: int) -> Engine:
    if kind == "NONE":
        return plain(target, **settings)
    return speculative(target, random_head(target, kind, draft_vocab=BROKEN), **settings)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 5, "the prompt is empty"),
        ([1] * 200, 100, "200 prompt tokens and max_tokens 100 exceed the context length of 256"),
        ([1, VOCAB], 5, "token id 24 is outside the vocabulary of 24"),
        ([1, -1], 5, "token id -1 is outside the vocabulary of 24"),
    ],
)
def test_what_can_never_be_served_is_refused_and_the_rest_goes_on(
    engine: Engine, prompt: list[int], max_tokens: int, message: str
) -> None:
    outcome = run(engine, [request("bad", prompt, max_tokens=max_tokens), request("good", [1, 2, 3])])
    assert outcome["bad"].reason is FinishReason.REFUSED
    assert outcome["bad"].error == message
    assert outcome["good"].error is None
    assert outcome["good"].tokens


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", ["NONE", "EAGLE"])
def test_a_request_whose_logits_are_not_finite_fails_alone_and_leaves_no_kv(
    target: TargetModel, kind: str, page: int
) -> None:
    prompt = [1 + i % 20 for i in range(40)]
    good = [request(f"good {i}", [*prompt, i], seed=i, temperature=1.0) for i in range(3)]
    expected = tokens_of(run(build(target, kind), good))
    engine = build(target, kind, page_size=page)
    run(engine, [request("warm", prompt)])
    assert engine.scheduler.kv.radix is not None
    for name in ("bad", "bad again"):
        cached = engine.scheduler.kv.radix.cached_pages
        failed = run(engine, [request(name, [*prompt, BROKEN, 5, 6])])[name]
        assert failed.reason is FinishReason.ERROR
        assert failed.error is not None
        assert "not finite" in failed.error
        assert failed.tokens == []
        assert failed.cached_tokens >= 32
        assert engine.scheduler.kv.radix.cached_pages == cached
    outcome = run(engine, [*good[:2], request("bad", [*prompt, BROKEN])], joining={2: good[2:]})
    assert outcome.pop("bad").reason is FinishReason.ERROR
    assert tokens_of(outcome) == expected


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", ["NONE", "EAGLE"])
def test_choices_of_one_prompt_prefill_it_once_and_have_their_own_texts(
    target: TargetModel, kind: str, page: int
) -> None:
    prompt = [1 + i % 20 for i in range(100)]
    choices = [request(i, prompt, choice=i, seed=7, temperature=1.0) for i in range(6)]
    expected = {each.request_id: run(build(target, kind), [each])[each.request_id].tokens for each in choices}
    engine, computed = build(target, kind, page_size=page, chunked_prefill_size=32), list[int]()

    def count(_: int) -> None:
        cycle = engine.take_cycle()
        computed.append(0 if cycle is None else cycle.computed)

    assert tokens_of(run(engine, choices, each_cycle=count)) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > 1
    assert 100 < sum(computed) <= 100 + 5 * page


@pytest.mark.parametrize("page", [1, 16])
def test_pages_that_a_failing_prompt_shared_while_it_ran_leave_the_cache(target: TargetModel, page: int) -> None:
    bad = [BROKEN, *(1 + i % 20 for i in range(100))]
    engine = build(target, "EAGLE", page_size=page, chunked_prefill_size=32)
    asked = [request("first", bad), request("equal", bad), request("other end", [*bad[:60], *range(1, 20)])]
    outcome = run(engine, asked)
    assert {finished.reason for finished in outcome.values()} == {FinishReason.ERROR}
    assert outcome["other end"].cached_tokens >= 48
    assert engine.scheduler.kv.radix is not None
    assert engine.scheduler.kv.radix.cached_pages == 0


def test_a_request_that_forbids_every_token_is_refused(engine: Engine) -> None:
    every = tuple(range(VOCAB))
    outcome = run(engine, [request("a", [1, 2], min_tokens=2, stop_token_ids=every), request("b", [1, 2])])
    assert outcome["a"].reason is FinishReason.REFUSED
    assert outcome["b"].reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_stop_ids_beyond_the_vocabulary_do_no_harm(engine: Engine) -> None:
    (outcome,) = run(engine, [request("a", [1, 2], min_tokens=3, stop_token_ids=(VOCAB + 5, -3))]).values()
    assert len(outcome.tokens) > 3


def test_an_abort_answers_with_the_next_step_and_an_unknown_one_is_ignored(engine: Engine) -> None:
    engine.abort("nobody")
    assert not engine.has_work()
    engine.add(request("a", [1, 2, 3], ignore_eos=True))
    engine.step()
    engine.abort("a")
    assert engine.stats().running == 0
    assert engine.has_work()
    (delta,) = engine.step()
    assert (delta.request_id, delta.finish_reason) == ("a", FinishReason.ABORT)
    assert not engine.has_work()
    engine.check()


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", ["NONE", "EAGLE", "EAGLE3"])
def test_a_text_may_fill_the_context_to_its_last_token(target: TargetModel, kind: str, page: int) -> None:
    """The trees extend past the context, and the pool holds exactly one request."""
    prompt = [1 + i % 20 for i in range(CONTEXT - 20)]
    each = request("a", prompt, max_tokens=20, ignore_eos=True, temperature=1.0)
    expected = run(plain(target), [each])["a"].tokens
    window = 2 if kind == "NONE" else tree_size(3, 4)
    slots = -(-(CONTEXT + window) // page) * page
    outcome = run(build(target, kind, page_size=page, max_total_tokens=slots), [each])["a"]
    assert len(outcome.tokens) == 20
    assert outcome.tokens == expected
    assert outcome.reason is FinishReason.LENGTH
    assert run(build(target, kind, page_size=page, max_total_tokens=slots - page), [each])["a"].error is not None


def test_statistics_count_what_was_done(target: TargetModel) -> None:
    engine = build(target, "EAGLE")
    engine.add(request("a", [1, 2, 3], ignore_eos=True, max_tokens=12))
    engine.add(request("b", [4, 5], ignore_eos=True, max_tokens=12))
    stats = engine.stats()
    assert (stats.waiting, stats.waiting_clients) == (2, 1)
    assert stats.longest_wait > 0
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.generated_tokens) == (2, 0, 2)
    assert (stats.waiting_clients, stats.longest_wait) == (0, 0.0)
    outcome = run(engine, ())
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.generated_tokens) == (0, 0, 24)
    specs = [finished.spec for finished in outcome.values() if finished.spec is not None]
    assert len(specs) == 2
    assert stats.accepted_tokens == sum(spec.accepted for spec in specs)
    assert stats.drafted_tokens == sum(spec.drafted for spec in specs)
    # Whole trees, but for the last cycles, in which fewer than 3 drafts could be kept.
    most = tree_size(3, 4) - 1
    assert all((spec.cycles - 3) * most < spec.drafted <= spec.cycles * most for spec in specs)
    assert stats.kv_slots_free == stats.kv_slots_total
    assert 0 < stats.kv_slots_cached < stats.kv_slots_total
    assert set(stats.stage_seconds) == {
        "budget",
        "read",
        "extend",
        "propose",
        "build_tree",
        "verify",
        "accept",
        "keep",
        "prefill",
        "emit",
    }


def test_numbers_with_which_nothing_could_be_served_are_refused(target: TargetModel) -> None:
    with pytest.raises(ValueError, match="--max-total-tokens 12"):
        build(target, "EAGLE", max_total_tokens=12)
    with pytest.raises(ValueError, match="--speculative-eagle-topk 24: the head drafts from 23 tokens"):
        speculative(target, random_head(target, "EAGLE", draft_vocab=BROKEN), steps=1, topk=24)


def test_flushing_drops_the_prefix_cache_but_not_under_requests(target: TargetModel) -> None:
    engine = build(target, "NONE")
    asked = request("a", [1, 2, 3, 4, 5], max_tokens=4)
    run(engine, [asked])
    engine.add(asked)
    refused = engine.flush_cache()
    assert (refused.is_done, refused.running + refused.waiting, refused.freed_slots) == (False, 1, 0)
    engine.abort("a")
    while engine.has_work():
        engine.step()
    cached = engine.stats().kv_slots_cached
    flushed = engine.flush_cache()
    assert flushed.is_done
    assert flushed.freed_slots == cached > 0
    assert engine.stats().kv_slots_cached == 0
    engine.check()


def test_the_budgets_state_is_rare_while_there_is_work_and_new_after_it(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(target, "EAGLE3")
    monkeypatch.setattr(type(engine.worker.drafting.budget), "state", lambda budget: "its state")
    engine.add(request("0", [1, 2, 3], ignore_eos=True))
    seen = []
    while engine.has_work():
        engine.step()
        seen.append(engine.stats().speculation)
    assert seen[0] == seen[-1] == "its state"
    assert None in seen[1:-1]
