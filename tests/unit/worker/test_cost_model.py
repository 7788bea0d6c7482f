"""The cost model: what was measured, and how it follows a machine that changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eagle_server.plan import Decode, RequestSampling
from eagle_server.request import SamplingParams
from eagle_server.worker.budget.cost_model import CostCurve, CostModel
from eagle_server.worker.budget.outcome import Outcome

DECODES = [Decode(0, 100, 0, RequestSampling(SamplingParams(max_tokens=9, seed=0), key=0))]


def test_a_curve_goes_through_its_points_and_on_beyond_them() -> None:
    curve = CostCurve()
    curve.fit({1: 5e-3, 8: 6e-3, 64: 20e-3})
    assert curve.predict(np.array([1.0, 8.0, 64.0])) == pytest.approx([5e-3, 6e-3, 20e-3])
    assert float(curve.predict(128.0)) == pytest.approx(20e-3 + 64 * 14e-3 / 56)


def test_more_rows_never_take_less_time_whatever_was_measured() -> None:
    curve = CostCurve()
    curve.fit({1: 5e-3, 8: 4e-3, 64: 20e-3})
    for rows, error in ((8, -0.5), (2, 1.0), (300, -0.5)):
        curve.move(rows, 0.0, error)
        assert (np.diff(curve.seconds) >= 0).all()


def test_a_context_costs_what_was_measured() -> None:
    curve = CostCurve()
    curve.fit({1: 5e-3, 8: 6e-3}, per_kv=1e-6)
    assert float(curve.predict(1.0, 3000.0)) == pytest.approx(8e-3)


def test_observations_correct_the_shape() -> None:
    model = CostModel()
    model.verify.fit({1: 5e-3, 128: 30e-3})
    random = np.random.default_rng(0)

    def real(rows: float) -> float:
        return 4e-3 + max(0.0, rows - 16) * 3e-4

    for _ in range(3000):
        rows = float(random.integers(1, 100))
        model.observe(model.verify, rows, 0.0, real(rows) * random.normal(1, 0.03))
    for rows in (2, 8, 24, 60):
        assert model.speed * float(model.verify.predict(rows)) == pytest.approx(real(rows), rel=0.15)


def test_a_slower_machine_is_noticed_at_once_and_for_all_sizes() -> None:
    model = CostModel()
    model.verify.fit({1: 5e-3, 128: 30e-3})
    for _ in range(40):
        model.observe(model.verify, 1, 0.0, 12e-3)
    assert model.speed * float(model.verify.predict(128.0)) > 50e-3


def test_one_outlier_moves_little() -> None:
    model = CostModel()
    model.verify.fit({1: 5e-3, 128: 30e-3})
    model.observe(model.verify, 1, 0.0, 5.0)
    assert model.speed * float(model.verify.predict(1.0)) < 6.5e-3


def test_a_description_is_plain_numbers() -> None:
    model = CostModel()
    model.verify.fit({1: 5e-3, 128: 30e-3})
    found = model.describe(13)
    assert found["verify"]["rows"] == [1, 2, 3, 4, 6, 8, 12]
    assert all(type(each) is float for each in found["verify"]["ms"])


@pytest.mark.parametrize(("noise", "most"), [(0.1, 0.2), (0.3, 0.6)])
def test_noise_does_not_move_sizes_that_are_never_seen(noise: float, most: float) -> None:
    model, random = CostModel(), np.random.default_rng(1)
    model.verify.fit({1: 5e-3, 8: 6e-3, 512: 80e-3}, per_kv=1e-6)
    expected = model.verify.predict(np.array([1.0, 40.0, 300.0, 5000.0]))
    seconds = float(model.verify.predict(8.0, 900.0))
    for _ in range(30_000):
        model.observe(model.verify, 8, 900.0, seconds * random.lognormal(-(noise**2) / 2, noise))
    found = model.speed * model.verify.predict(np.array([1.0, 40.0, 300.0, 5000.0]))
    assert (abs(found / expected - 1) < most).all(), found / expected


def test_nothing_observed_makes_a_prediction_negative_or_not_finite() -> None:
    model, random = CostModel(), np.random.default_rng(2)
    model.verify.fit({1: 5e-3, 384: 80e-3}, per_kv=1e-6)
    for _ in range(5000):
        rows, kv = float(random.integers(1, 384)), float(random.integers(100, 50_000))
        model.observe(model.verify, rows, kv, 5e-3 * random.lognormal(0, 1) + 1e-4 * rows)
        assert 0 < model.speed * float(model.verify.predict(rows, kv)) < 10


def test_a_stage_that_took_no_time_at_first_is_learned() -> None:
    model = CostModel()
    model.step.fit({1: 0.0})
    for _ in range(200):
        model.observe(model.step, 1, 0.0, 1e-5)
    assert float(model.step.predict(1.0)) > 0


def test_nodes_make_the_reading_of_long_texts_dearer() -> None:
    model = CostModel(kv_per_node=0.02)
    model.verify.fit({1: 7e-3, 100: 8e-3}, per_kv=4e-8)
    plain, wide = (model.verify.at(64.0, float(model.kv_cost(32_768.0, nodes))) for nodes in (1, 64))
    assert wide - plain == pytest.approx(4e-8 * 32_768 * 0.02 * 63)
    drafting, rows = np.array([1.0]), np.array([[1.0], [64.0]])
    seconds = model.cycle(rows, drafting, 0.0, 0.0, 0.0, model.kv_cost(32_768.0, rows))
    assert seconds[1, 0] == pytest.approx(wide)


def cycle(stages: dict[str, float], drafts: bool, joined: int = 0, waited: float = 3e-4) -> Outcome:
    seconds = sum(stages.values()) + waited
    drafted = {"drafting": (0,), "extended": 1.0, "forwards": 1, "fed": 1.0} if drafts else {"drafting": ()}
    rows = 4.0 if drafts else 1.0
    return Outcome(
        DECODES, tokens=1, seconds=seconds, waited=waited, stages=stages, rows=rows, joined=joined, **drafted
    )


def test_a_forward_that_nobody_took_costs_no_cycle_anything() -> None:
    model = CostModel()
    model.verify.fit({1: 2e-3, 8: 3e-3})
    plain = {"verify": 2e-3, "accept": 2e-4, "emit": 1e-4, "unused": 5e-3}
    for _ in range(50):
        model.learn(cycle(plain, drafts=False))
    assert model.between == pytest.approx(6e-4, rel=0.02)


def test_what_drafts_cost_the_host_does_not_make_plain_cycles_dearer() -> None:
    """Acceptance of trees takes longer, and so does what comes after a cycle. It is no slower machine."""
    model = CostModel()
    model.verify.fit({1: 2e-3, 8: 3e-3})
    model.extend.fit({1: 1e-3, 8: 1e-3})
    model.step.fit({1: 1e-3})
    plain = {"verify": 2e-3, "accept": 2e-4, "emit": 1e-4}
    for _ in range(50):
        model.learn(cycle(plain, drafts=False))
    foretold = model.speed * model.verify.at(1.0) + model.between
    assert foretold == pytest.approx(sum(plain.values()) + 3e-4, rel=0.02)
    slow = {"extend": 1e-3, "propose": 1.3e-3, "verify": model.verify.at(4.0), "accept": 1e-3, "emit": 5e-4}
    for _ in range(100):
        model.learn(cycle(slow, drafts=True, waited=1e-3))
    assert model.speed * model.verify.at(1.0) + model.between == pytest.approx(foretold, rel=0.02)
    assert model.speed * model.extend.at(1.0) == pytest.approx(1e-3 + 1.2e-3 + 7e-4, rel=0.1)


def test_what_prompts_add_to_a_forward_is_learned_from_such_cycles() -> None:
    """Their rows need no logits, so they cost less than as many rows of trees."""
    model = CostModel()
    model.verify.fit({1: 2e-3, 100: 12e-3})
    joined = cycle({"verify": 5e-3}, drafts=False, joined=60)
    assert model.joining(joined) == 0.0
    for _ in range(3):
        model.learn(joined)
        assert model.joining(joined) == pytest.approx(3e-3, rel=0.01)
    assert model.joining(cycle({"verify": 5e-3}, drafts=False, joined=30)) == pytest.approx(1.5e-3, rel=0.05)
    assert model.speed * model.verify.at(1.0) == 2e-3, "it is not moved"


def test_what_a_drafter_reads_first_costs_by_its_rows() -> None:
    model = CostModel()
    for curve in (model.verify, model.extend, model.step):
        curve.fit({1: 1e-3, 8: 2e-3})
    extend = model.extend.at(1.0)
    stages = {"read": 4e-4, "extend": 1e-3, "propose": 1.3e-3, "verify": model.verify.at(4.0)}
    model.learn(dataclasses.replace(cycle(stages, drafts=True, waited=0.0), read=40))
    assert model.reading == pytest.approx(1e-5)
    assert model.extend.at(1.0) == extend, "draft-extend is no dearer"
