"""For every drafter and every kind of tree, output with speculation equals output without, greedy and sampled.

Float32 kernels round differently for one row and for many rows. So a draw may change if its two best scores differ by
less than 1e-4. The texts here have no such draw (checked in float64), so every difference is a bug.

On the flashinfer backend the whole engine runs as on a GPU. Batches are padded to the sizes of the graphs. Every
forward is planned on the host and bound on the device. A replay calls the captured function with the host values of its
first call.
"""

from __future__ import annotations

from typing import Any

import pytest

from eagle_server.engine.engine import Engine
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.scenes import SCENES, SIZES, as_on_a_gpu, check, play
from tests.support.engines import tokens_of

every_drafter = pytest.mark.parametrize("drafting", CASES, indirect=True)


def played_on_a_gpu() -> list[tuple[str, str, int, str]]:
    """(drafter, attention mode for trees, page size, scene). Both modes run with both page sizes, and every scene."""
    batches = [("mask", 16, "batch"), ("cascade", 1, "batch")]
    others = [("mask", 1, "alone"), ("cascade", 16, "preempted"), ("mask", 1, "prefix_hit")]
    scenes = {True: batches + others, False: batches[:1] + others[:2]}  # a chain is causal, so it has one mode
    return [(name, *scene) for name, case in CASES.items() for scene in scenes[case.branches]]


def check_case(drafting: Drafting, scene: str, settings: dict[str, Any]) -> Engine:
    """Run a scene and check its texts. Returns the last engine of the scene."""
    outcome, engines = play(scene, lambda **given: drafting.engine(**{**settings, **given}))
    if drafting.drafts:
        check(drafting.pair.target, outcome, drafting.texts, engines)
    else:
        assert tokens_of(outcome) == {name: drafting.texts[name] for name in outcome}
        assert engines[-1].stats().drafted_tokens == 0
    return engines[-1]


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("page", [1, 16])
@every_drafter
def test_output_with_a_drafter_equals_output_without(drafting: Drafting, page: int, scene: str) -> None:
    check_case(drafting, scene, {"page_size": page})


@pytest.mark.parametrize(("drafting", "form", "page", "scene"), played_on_a_gpu(), indirect=["drafting"])
def test_captured_cycles_on_flashinfer_give_the_plain_text(
    drafting: Drafting, form: str, page: int, scene: str
) -> None:
    modes = {"verify_attention": form, "draft_attention": form}
    engine = check_case(drafting, scene, {"page_size": page, **modes, **as_on_a_gpu()})
    assert len(engine.worker.verifier.graphs.keys) == drafting.case.stages * len(SIZES), "each stage once per size"
