"""For every drafter and every kind of tree, output with speculation equals output without, greedy and sampled.

Float32 kernels round differently for one row and for many rows. So a draw may change if its two best scores differ by
less than 1e-4. The texts here have no such draw (checked in float64), so every difference is a bug.

On the flashinfer backend the whole engine runs as on a GPU. Batches are padded to the sizes of the graphs. Every
forward is planned on the host and bound on the device. A replay calls the captured function with the host values of its
first call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from eagle_server.attention.batches import CAPTURED_PIECES
from eagle_server.engine.engine import Engine
from eagle_server.speculation.tree_config import extend_widths
from eagle_server.worker import worker
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.lossless.pairs import eagle
from tests.lossless.scenes import SCENES, as_on_a_gpu, check, play
from tests.support.covering import deep_unless
from tests.support.engines import tokens_of

PAGES, MODES = (1, 16), ("mask", "cascade")
SIZES = (2, 8)  # batch sizes of the captured graphs: a capture takes longer than the requests
OTHERS = [scene for scene in SCENES if scene != "batch"]


def played() -> Iterator[Any]:
    """(drafter, page size, scene): every drafter in each scene and with each page size, and each scene with both sizes.

    The gate has each drafter except EAGLE once, and each scene with each page size. EAGLE's head takes seconds
    to train and drafts like EAGLE-3's head; `test_equality` has an untrained one.
    """
    for number, (name, case) in enumerate(CASES.items()):
        for place, scene in enumerate(SCENES):
            page = PAGES[(number // len(SCENES) + number + place) % len(PAGES)]
            quick = place == number % len(SCENES) and case.maker is not eagle
            yield pytest.param(name, page, scene, marks=deep_unless(quick))


def played_on_a_gpu() -> Iterator[Any]:
    """(drafter, attention mode for trees, page size, scene): every drafter with each mode, in the batch and in one more
    scene. Both modes run with both page sizes, and every scene.

    The gate has every third drafter once, with each mode.
    """
    for number, (name, case) in enumerate(CASES.items()):
        modes = MODES if case.branches else MODES[:1] * 2  # a chain is causal, so it has one mode
        first = number // 2 % 2
        for place, mode in enumerate(modes):
            scene = "batch" if place == first else OTHERS[number // 3 % len(OTHERS)]
            page = PAGES[(number // 4 + place) % len(PAGES)]
            quick = number % 3 == 0 and place == number // 3 % 2
            yield pytest.param(name, mode, page, scene, marks=deep_unless(quick))


def check_case(drafting: Drafting, scene: str, settings: dict[str, Any]) -> Engine:
    """Run a scene and check its texts. Returns the last engine of the scene."""
    outcome, engines = play(scene, lambda **given: drafting.engine(**{**settings, **given}))
    if drafting.drafts:
        check(drafting.pair.target, outcome, drafting.texts, engines)
    else:
        assert tokens_of(outcome) == {name: drafting.texts[name] for name in outcome}
        assert engines[-1].stats().drafted_tokens == 0
    return engines[-1]


@pytest.mark.parametrize(("drafting", "page", "scene"), list(played()), indirect=["drafting"])
def test_output_with_a_drafter_equals_output_without(drafting: Drafting, page: int, scene: str) -> None:
    check_case(drafting, scene, {"page_size": page})


@pytest.mark.parametrize(("drafting", "form", "page", "scene"), list(played_on_a_gpu()), indirect=["drafting"])
def test_captured_cycles_on_flashinfer_give_the_plain_text(
    drafting: Drafting, form: str, page: int, scene: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_MISSES", 1000)  # mixed forwards stay eager
    modes = {"verify_attention": form, "draft_attention": form}
    engine = check_case(drafting, scene, {"page_size": page, **modes, **as_on_a_gpu(SIZES)})
    captured = Counter(key[0] for key in engine.worker.verifier.graphs.keys)
    widths = len(extend_widths(engine.worker.batches.steps))
    assert captured.pop("extend", 0) in (0, widths * len(SIZES)), "draft-extend with each width"
    assert captured.pop("read", 0) <= len(CAPTURED_PIECES), "prompts of few rows, by the number of their pieces"
    assert set(captured.values()) == {len(SIZES)}, "each stage once per size"
    stages = {key[0] for key in engine.worker.verifier.graphs.keys} - {"read"}
    assert len(stages) == drafting.case.stages
