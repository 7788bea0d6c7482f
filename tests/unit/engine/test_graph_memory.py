"""The memory reserved for CUDA graphs is what their results take."""

from __future__ import annotations

import pytest

from eagle_server.attention.batches import CAPTURED_PIECES
from eagle_server.attention.flashinfer import backend as flashinfer
from eagle_server.engine.assembly.devices import graph_memory
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.warm_up import warm_up_mixed
from tests.support.engines import CONTEXT, random_head, random_target, speculative
from tests.support.flashinfer_emulation import Emulation
from tests.support.replay import FirstCallRecorder

SIZES = (1, 2, 4)


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("cascades", [False, True], ids=["mask", "mask and cascade"])
@pytest.mark.parametrize(("steps", "topk", "nodes"), [(4, 4, 13), (3, 1, 4)], ids=["tree", "chain"])
def test_captures_keep_what_was_reserved(
    steps: int, topk: int, nodes: int, monkeypatch: pytest.MonkeyPatch, *, cascades: bool, adaptive: bool
) -> None:
    monkeypatch.setattr(flashinfer, "CASCADE_FROM", CONTEXT if cascades else 2 * CONTEXT)
    recorder, target = FirstCallRecorder(), random_target(vocab=2048)
    engine = speculative(
        target,
        random_head(target, "EAGLE3"),
        steps,
        topk,
        nodes=nodes,
        backend="flashinfer",
        graph_sizes=SIZES,
        max_running_requests=max(SIZES),
        adaptive=adaptive,
        poison=False,
        stand_ins={"flashinfer": Emulation(), "recorder": recorder},
    )
    for size in SIZES:  # of mixed forwards, all of which write to the same memory
        for pieces in CAPTURED_PIECES:
            warm_up_mixed(engine.worker, TreeShape(0, 1) if adaptive else TreeShape(steps, nodes), size, 2, pieces)
    reserved = graph_memory(SIZES, TreeConfig(steps, topk, nodes), target.config, streams=3, adaptive=adaptive)
    assert recorder.kept_bytes <= reserved < 2 * recorder.kept_bytes
