"""The budget of a cycle: it drafts where that pays, no more, and comes back."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from eagle_server.plan import Decode, RequestSampling, TreeShape
from eagle_server.request import SamplingParams
from eagle_server.worker.budget.budget import NOTHING, AdaptiveBudget, CycleBudget
from eagle_server.worker.budget.cost_model import CostModel, draft_steps
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.budget.outcome import LessonOutcome, Outcome
from eagle_server.worker.budget.policy import POLICY
from eagle_server.worker.budget.prospects import Floats, Ints, shapes
from eagle_server.worker.first_drafts import FirstDrafts

STEPS, SIZE = 5, 8
Forwards = Callable[[TreeShape], tuple[int, int]]
CPU = torch.device("cpu")


def decode(index: int, temperature: float = 0.0, seq_len: int = 100, **given: Any) -> Decode:
    params = SamplingParams(max_tokens=9, seed=0, temperature=temperature)
    return Decode(index, seq_len, 7, RequestSampling(params, key=index), all_tokens=[1, 2, 3], **given)


def costs(
    per_row: float, fixed: float = 8e-3, step: float = 5e-4, per_request: float = 0.0, period: int = 8
) -> CostModel:
    """Milliseconds that grow with the rows verified, from the first row on. No observation moves them."""
    model = CostModel(replace(POLICY, rate=0.0, lesson_period=period))
    model.verify.fit({1: fixed + per_row, 1000: fixed + 1000 * per_row})
    model.extend.fit({1: step, 1000: step + 1000 * per_request})
    model.step.fit({1: step, 1000: step + 1000 * per_request})
    return model


def chains(chances: Sequence[float], shape: TreeShape) -> dict[str, Any]:
    """Trees with one node per level; each is accepted with its request's chance if its parent is."""
    depths = np.tile(np.arange(1, shape.steps + 1), (len(chances), 1))
    return trees(shape, depths * np.log(np.array(chances)[:, None]), depths - 1)


def trees(shape: TreeShape, logp: Floats, parents: Ints) -> dict[str, Any]:
    """Trees of which no node is tried, as `LessonOutcome` has them."""
    nobody, roots = np.zeros(parents.shape, np.bool_), np.zeros((len(logp), 1), int)
    verified = {"guesses": logp, "verified_parents": parents, "depths": parents, "is_node": nobody, "path": roots}
    return {"shape": shape, "logp": logp, "parents": parents, **verified}


def learn(
    budget: AdaptiveBudget,
    decodes: list[Decode],
    chosen: CycleBudget,
    trees: dict[str, Any] | None = None,
    tokens: int = 0,
    seconds: float = 1.0,
) -> None:
    """The cycle is over. Only of a lesson the trees are read."""
    make = LessonOutcome if chosen.is_lesson and trees else Outcome
    read = trees if chosen.is_lesson and trees else {}
    of = decodes, chosen.drafting, tokens, seconds, 0.0, {"verify": seconds}
    budget.learn(make(*of, rows=len(decodes), is_lesson=chosen.is_lesson, **read))


def settled(budget: AdaptiveBudget, decodes: list[Decode], chance: float, cycles: int = 80) -> list[CycleBudget]:
    """Cycles in which every drafted tree is such a chain. Without the lessons."""
    chosen = []
    for _ in range(cycles):
        budgeted = budget.choose(decodes, [True] * len(decodes))
        chosen += [] if budgeted.is_lesson else [budgeted]
        take(budget, decodes, budgeted, chance)
    return chosen


def take(budget: AdaptiveBudget, decodes: list[Decode], chosen: CycleBudget, chance: float) -> None:
    """The cycle takes as long as the model says, and gives as many tokens as are expected."""
    count, drafting = float(len(decodes)), float(len(chosen.drafting))
    levels = [d for d in range(1, chosen.steps + 1) if d * math.log(chance) >= chosen.least_logp - 1e-9]
    tokens = count + drafting * sum(chance**depth for depth in levels)
    kv, costs = float(sum(each.seq_len for each in decodes)), budget.costs
    seconds = costs.verify.at(count, kv)
    if drafting:
        option = next(n for n, each in enumerate(budget.prospects.options) if each[0] >= chosen.steps)
        nodes = np.full((len(budget.prospects.options), 1), drafting * len(levels))
        seconds = float(budget._seconds(len(decodes), nodes, np.array([drafting]), kv)[option, 0])
    drafted = chains([chance] * len(chosen.drafting), chosen.shape) if chosen.drafting else None
    learn(budget, decodes, chosen, drafted, round(tokens), seconds)


def level_by_level(shape: TreeShape) -> tuple[int, int]:
    """`Drafter.forwards` of a head whose draft-extend finds the first level."""
    return shape.steps - 1, shape.topk or 4


def in_one_block(shape: TreeShape) -> tuple[int, int]:
    """Those of a block drafter."""
    return 1, shape.steps + 1


def adaptive(model: CostModel, forwards: Forwards = level_by_level, **given: Any) -> AdaptiveBudget:
    return AdaptiveBudget(64, (STEPS, SIZE), model, AcceptanceEstimates(CPU), forwards, **given)


def test_cheap_rows_and_good_drafts_get_the_whole_depth() -> None:
    last = settled(adaptive(costs(1e-5)), [decode(0)], 0.9)[-1]
    assert last.drafting == (0,)
    assert last.steps == STEPS


def test_dear_rows_get_none_of_bad_drafts() -> None:
    chosen = settled(adaptive(costs(2e-3)), [decode(i) for i in range(8)], 0.1, cycles=100)
    assert chosen[-1].drafting == ()
    assert sum(len(each.drafting) for each in chosen[-20:]) <= 2, "probes are rare"


def test_depth_is_cut_where_the_next_level_does_not_pay() -> None:
    budget = settled(adaptive(costs(1e-4, step=2e-3)), [decode(0)], 0.5)[-1]
    assert 0 < budget.steps < STEPS


def test_the_load_switches_drafting_off_and_on_again() -> None:
    budget = adaptive(costs(1e-3))
    few, many = [decode(0)], [decode(i) for i in range(40)]
    assert settled(budget, few, 0.6)[-1].drafting == (0,)
    assert len(settled(budget, many, 0.6, cycles=120)[-1].drafting) <= 1
    assert settled(budget, few, 0.6)[-1].drafting == (0,)


def test_a_request_whose_drafts_are_not_believed_gets_its_root_only() -> None:
    budget, decodes = adaptive(costs(5e-4, per_request=3e-4, period=1)), [decode(0), decode(1)]
    for _ in range(60):
        chosen = budget.choose(decodes, [True, True])
        learn(budget, decodes, chosen, chains([[0.9, 0.02][n] for n in chosen.drafting], chosen.shape))
    assert chosen.drafting == (0,)
    assert chosen.least_logp > math.log(0.02)


def test_a_request_that_was_not_believed_is_probed_and_comes_back() -> None:
    budget, alone = adaptive(costs(1e-3)), [decode(0)]
    assert settled(budget, alone, 0.02)[-1].drafting == ()
    later = settled(budget, alone, 0.95, cycles=3000)
    assert sum(len(each.drafting) for each in later[-100:]) > 80
    assert settled(budget, alone, 0.95)[-1].steps == STEPS, "also the levels that were not drafted meanwhile"


def test_lessons_draft_for_greedy_requests_until_the_draft_is_judged() -> None:
    """Else a budget that stops drafting would hide why."""
    first_drafts = FirstDrafts("causes")
    model, decodes = costs(per_row=1.0, period=1), [decode(0), decode(1, temperature=1.0)]
    budget = adaptive(model, first_drafts=first_drafts)
    for _ in range(POLICY.first_lessons):
        chosen = budget.choose(decodes, [True, True])
        learn(budget, decodes, chosen, chains([0.01, 0.01], chosen.shape))
    assert budget.choose(decodes, [True, True]).drafting == (0,)
    assert budget.choose(decodes, [False, True]).drafting == ()
    budget.lessons.policy = POLICY
    assert budget.choose(decodes, [True, True]).drafting == (), "lessons only"
    first_drafts.is_open, budget.lessons.policy = False, model.policy
    assert budget.choose(decodes, [True, True]).drafting == ()


def test_the_first_lessons_draft_even_where_nothing_is_expected() -> None:
    """The costs measured at start-up may be wrong by a busy moment, and the chances are a prior."""
    budget, decodes = adaptive(costs(per_row=1.0, period=1)), [decode(0), decode(1, temperature=1.0)]
    for _ in range(POLICY.first_lessons):
        chosen = budget.choose(decodes, [True, True])
        assert chosen.drafting == (0, 1)
        learn(budget, decodes, chosen, chains([0.5, 0.5], chosen.shape), tokens=2)
    assert budget._credit == 0.0
    assert budget.choose(decodes, [True, True]).drafting == ()
    budget.lessons.policy = POLICY
    assert budget.choose(decodes, [True, True]).drafting == ()


def test_requests_that_must_not_draft_do_not() -> None:
    assert adaptive(costs(1e-5)).choose([decode(0)], [False]) == replace(NOTHING, is_lesson=True)
    assert adaptive(costs(1e-5)).choose([decode(0), decode(1)], [False, True]).drafting == (1,)


def test_graphs_have_a_ladder_of_shapes() -> None:
    ladder = TreeShape(5, 8), TreeShape(3, 4), TreeShape(2, 2)
    shapes = {1: ladder, 8: ladder}
    few = settled(adaptive(costs(1e-5), shapes=shapes), [decode(0)], 0.9)[-1]
    assert (few.steps, few.nodes) == (5, 8)
    assert few.least_logp == -math.inf
    some = settled(adaptive(costs(6e-4), shapes=shapes), [decode(i) for i in range(8)], 0.75)[-1]
    assert some.shape in ladder[1:]
    assert len(some.drafting) == 8
    assert len(settled(adaptive(costs(2e-3), shapes=shapes), [decode(i) for i in range(8)], 0.2)[-1].drafting) <= 1


def test_batches_beyond_the_largest_size_have_choices_of_their_own() -> None:
    """16 requests: 2 log2 is 8, which is also the size of a batch."""
    ladder = TreeShape(5, 8), TreeShape(3, 4), TreeShape(2, 2)
    budget, decodes = adaptive(costs(1e-5), shapes={1: ladder, 8: ladder}), [decode(i) for i in range(16)]
    settled(budget, decodes[:8], 0.9)
    budget.choose(decodes, [True] * 16)
    assert "for 16 requests" in budget.state().choice


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("forwards", [level_by_level, in_one_block])
def test_the_choice_is_the_best_of_all_chains_by_the_formula(chance: float, forwards: Forwards) -> None:
    model, requests = costs(4e-4, step=3e-4, per_request=1e-4), 4
    chosen = settled(adaptive(model, forwards), [decode(i) for i in range(requests)], chance)[-1]
    kv = 100.0 * requests

    def rate(steps: int) -> float:
        tokens = requests * sum(chance**depth for depth in range(steps + 1))
        drafting = np.array([float(requests if steps else 0)])
        verify = float(model.verify.predict(requests * (steps + 1), kv))
        if not steps:
            return tokens / verify
        width = 1 + min(steps, 1.5 + 0.5 * math.log2(requests))
        extend = float(model.extend.predict(width * drafting)[0])
        count, fed = forwards(TreeShape(steps, SIZE, 1))
        proposing = draft_steps(count) * float(model.step.predict(fed * drafting)[0])
        return tokens / (verify + extend + proposing)

    best = max(range(STEPS + 1), key=rate)
    kept = sum(depth * math.log(chance) >= chosen.least_logp - 1e-9 for depth in range(1, chosen.steps + 1))
    assert rate(kept if len(chosen.drafting) > 1 else 0) > 0.98 * rate(best)


@pytest.mark.parametrize(("per_row", "most"), [(0.0, STEPS), (1e-4, 3)])
def test_rows_of_a_block_that_cost_more_than_they_bring_are_not_computed(per_row: float, most: int) -> None:
    """Verified rows cost next to nothing."""
    model = costs(1e-6, step=3e-4, per_request=per_row)
    chosen = settled(adaptive(model, in_one_block), [decode(i) for i in range(8)], 0.6)[-1]
    assert most - 1 <= chosen.steps <= most


def test_what_was_measured_to_be_slower_is_not_done_whatever_the_model_says() -> None:
    budget, decodes = adaptive(costs(2e-4)), [decode(i, tokens_left=20) for i in range(16)]
    for _ in range(200):
        chosen = budget.choose(decodes, [True] * 16)
        measured = (30, 30e-3) if chosen.drafting else (16, 12e-3)
        learn(budget, decodes, chosen, chains([0.6] * 16, chosen.shape) if chosen.drafting else None, *measured)
    assert sum(len(budget.choose(decodes, [True] * 16).drafting) > 1 for _ in range(50)) == 0
    assert budget.state().choice.startswith("off, because it was measured to be slower than plain decoding")
    few = sum(len(each.drafting) for each in settled(budget, decodes[:1], 0.6, cycles=100)[50:])
    assert few > 10, "other loads are measured for themselves"


@pytest.mark.parametrize("left", [2, 3, 4])
def test_no_deeper_tree_is_chosen_than_the_requests_may_keep(left: int) -> None:
    budget = adaptive(costs(1e-5))
    settled(budget, [decode(0)], 0.9)
    assert settled(budget, [decode(0, tokens_left=left)], 0.9)[-1].steps == left - 1
    assert settled(budget, [decode(0)], 0.9)[-1].steps == STEPS, "what was chosen for short ones holds for these only"


def test_a_level_that_pays_only_with_those_below_it_is_not_drafted_for_the_last_tokens() -> None:
    """Draft-extend costs more than the target: four more tokens pay for it, one does not."""
    model = costs(1e-5, step=1e-3)
    model.extend.fit({1: 14e-3, 1000: 14e-3})
    budget = adaptive(model)
    assert settled(budget, [decode(0)], 0.9, cycles=100)[-1].steps == STEPS
    assert settled(budget, [decode(0, tokens_left=2)], 0.9)[-1].drafting == ()


@pytest.mark.parametrize("apart", [1, 3])
def test_what_was_lost_on_short_answers_is_noticed_between_their_prompts(apart: int) -> None:
    """Cycles of either kind alternate, and their lengths differ: what is slower is found out all the same."""
    budget, decodes = adaptive(costs(2e-4)), [decode(0, tokens_left=3)]
    drafted = 0
    for cycle in range(600):
        if cycle % (apart + 1) == apart:  # the request's last token, which needs no draft
            chosen = budget.choose([decode(0, tokens_left=1)], [False])
            assert not chosen.drafting
            learn(budget, decodes, chosen, None, tokens=1, seconds=5e-3)
            continue
        chosen = budget.choose(decodes, [True])
        drafts = bool(chosen.drafting)
        measured = (2, 12e-3) if drafts else (1, 5e-3)
        learn(budget, decodes, chosen, chains([0.9], chosen.shape) if drafts else None, *measured)
        drafted += drafts and cycle >= 300
    assert drafted <= 40, "it is tried again, but seldom"


def test_what_drafting_loses_is_noticed_over_answers_of_all_lengths() -> None:
    """The foretold speed differs with the tokens that are left. Eight requests tell within a dozen cycles."""
    budget, drafted = adaptive(costs(2e-4)), 0
    for cycle in range(300):
        decodes = [decode(i, tokens_left=16 - cycle % 15) for i in range(8)]
        chosen = budget.choose(decodes, [True] * 8)
        drafts = bool(chosen.drafting)
        measured = (16, 16e-3) if drafts else (8, 6e-3)
        learn(budget, decodes, chosen, chains([0.9] * 8, chosen.shape) if drafts else None, *measured)
        drafted += drafts and not chosen.is_lesson and cycle >= 100
    assert drafted <= 20, "it is tried again, but seldom"


def test_drafts_that_lose_at_the_beginning_of_all_answers_are_tried_again_and_stay() -> None:
    """Sixteen answers of 48 tokens begin together. No draft of the first 20 tokens is right."""
    budget, drafted, written = adaptive(costs(2e-4)), list[bool](), 0
    for _ in range(400):
        decodes = [decode(i, tokens_left=48 - written) for i in range(16)]
        chosen = budget.choose(decodes, [True] * 16)
        drafts = len(chosen.drafting) == 16
        kept = 4 if drafts and written >= 20 else 1
        tree = chains([0.9] * 16, chosen.shape) if drafts else None
        learn(budget, decodes, chosen, tree, 16 * kept, 12e-3 if drafts else 10e-3)
        written = 0 if written + kept >= 47 else written + kept
        drafted += [] if chosen.is_lesson else [drafts]
    assert sum(drafted[200:]) >= 0.9 * len(drafted[200:])


def test_plain_decoding_is_measured_where_drafting_promises_much() -> None:
    budget, decodes = adaptive(costs(1e-5)), [decode(0)]
    chosen = settled(budget, decodes, 0.9, cycles=990)
    plain = [not each.drafting for each in chosen]
    assert sum(plain) == POLICY.plain_cycles, "once, in a row"
    assert sum(map(operator.ne, plain, plain[1:])) <= 2


@pytest.mark.parametrize(("second", "width"), [(0.02, 1), (0.3, 2)])
def test_draft_steps_are_as_wide_as_pays(second: float, width: int) -> None:
    """Each node has a likely first child, and a second one that is accepted with the given chance."""
    model = costs(1e-4, period=1)
    model.step.fit({1: 5e-4, 2: 6e-4, 4: 3e-3})
    decodes, parents = [decode(0)], np.array([[0, 0, 1, 1, 2, 2, 0]])
    budget = AdaptiveBudget(64, (2, 8), model, AcceptanceEstimates(CPU), level_by_level, 4)
    chances = np.log(np.array([[0.6, second, 0.36, 0.6 * second, 0.6 * second, second**2, 0.001]]))
    for _ in range(40):
        chosen = budget.choose(decodes, [True])
        assert chosen.topk == 0, "a lesson has all nodes"
        learn(budget, decodes, chosen, trees(chosen.shape, chances, parents))
    for _ in range(POLICY.plain_cycles):
        learn(budget, decodes, replace(NOTHING, is_lesson=True), tokens=1, seconds=1e-2)
    budget.lessons.policy = POLICY
    chosen = budget.choose(decodes, [True])
    assert (chosen.drafting, chosen.topk) == ((0,), width)


@pytest.mark.parametrize(("excess", "width"), [(1.0, 2), (1.5, 1)])
def test_trees_that_branch_and_take_longer_than_foretold_give_way_to_chains(excess: float, width: int) -> None:
    model, decodes, parents = costs(1e-4, period=8), [decode(0)], np.array([[0, 0, 1, 1, 2, 2, 0]])
    model.step.fit({1: 5e-4, 2: 6e-4, 4: 3e-3})
    budget = AdaptiveBudget(64, (2, 8), model, AcceptanceEstimates(CPU), level_by_level, 4)
    chances = np.log(np.array([[0.6, 0.3, 0.36, 0.18, 0.18, 0.09, 0.001]]))
    for _ in range(200):
        chosen = budget.choose(decodes, [True])
        seconds = budget._choice.seconds * (excess if chosen.topk > 1 else 1.0) or 1e-2
        learn(budget, decodes, chosen, trees(chosen.shape, chances, parents), 2, seconds)
    widths = [each.topk for each in (budget.choose(decodes, [True]) for _ in range(8)) if each.drafting]
    assert set(widths) - {0} == {width}


def test_one_probe_tells_less_of_a_batch_than_trees_of_all_its_requests() -> None:
    """One lucky tree must not begin drafting for all."""
    budget, decodes = adaptive(costs(1e-3, period=1)), [decode(i) for i in range(8)]
    everybody = budget.choose(decodes, [True] * 8)
    for _ in range(100):
        budget.choose(decodes, [True] * 8)
        learn(budget, decodes, everybody, chains([0.1] * 8, everybody.shape))
    lucky = chains([0.95], everybody.shape)
    before = budget.prospects.tokens[64].max()
    budget.lessons.cycle += POLICY.lesson_period
    learn(budget, decodes, replace(everybody, drafting=(0,)), lucky)
    one = budget.prospects.tokens[64].max() - before
    budget.lessons.cycle += POLICY.lesson_period
    learn(budget, decodes, everybody, chains([0.95] * 8, everybody.shape))
    assert 0 < one < (budget.prospects.tokens[64].max() - before - one) / 4


def test_plain_cycles_teach_only_now_and_then_once_their_speed_is_known() -> None:
    budget, decodes = adaptive(costs(2e-3)), [decode(i) for i in range(8)]
    settled(budget, decodes, 0.1, cycles=100)
    chosen = []
    for _ in range(64):
        chosen.append(budget.choose(decodes, [True] * 8))
        learn(budget, decodes, chosen[-1], None, tokens=8)
    lessons = sum(each.is_lesson for each in chosen)
    assert not any(each.drafting for each in chosen if not each.is_lesson)
    assert sum(each.is_observed for each in chosen) <= 64 / POLICY.observed_every + lessons


def test_a_request_may_read_as_much_as_its_drafts_will_save() -> None:
    model = costs(1e-5)
    budget = adaptive(model)
    assert settled(budget, [decode(0)], 0.9)[-1].most_read == math.inf, "nothing was read so far"
    model.reading = 1e-4
    last = settled(budget, [decode(0)], 0.9)[-1]
    saved = 1 / budget.state().plain_tokens_per_second - 1 / budget.state().tokens_per_second
    assert last.most_read == pytest.approx(saved / 1e-4)


def test_depths_and_widths_of_a_tree() -> None:
    """Node 4 is the second best of its level, so its child needs two columns; node 6 is a third child."""
    parents = np.array([[0, 0, 1, 1, 4, 1]])
    depths, widths = shapes(np.log(np.array([[0.6, 0.3, 0.4, 0.2, 0.1, 0.05]])), parents)
    assert depths.tolist() == [[1, 1, 2, 2, 3, 2]]
    assert widths.tolist() == [[1, 2, 1, 2, 2, 3]]
