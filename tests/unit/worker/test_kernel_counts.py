"""How many kernels a cycle launches on a GPU, by stage. The sum of kernels and uploads only goes down.

EAGLE-3 with a Llama-shaped target, one request: 6 steps, topk 8, 64 nodes.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from eagle_server.engine.assembly import assemble
from eagle_server.engine.engine import Engine
from eagle_server.models.layers import DecoderLayer
from eagle_server.ops.triton_support import HAS_TRITON
from eagle_server.speculation.accept import Lossless
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.cycle import Cycle
from eagle_server.worker.drafters import multi_step
from eagle_server.worker.drafters.multi_step import MultiStep
from eagle_server.worker.drafters.pairs import PairReader
from eagle_server.worker.verifier import Verifier
from eagle_server.worker.worker import Worker
from tests.support import kernel_counts
from tests.support.engines import random_head, random_target, request, run, speculative
from tests.support.flashinfer_emulation import Emulation
from tests.support.kernel_counts import CountedRecorder, LaunchCounter, take_gpu_branches

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)
LAYERS = 4


def counted(monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], **settings: Any) -> LaunchCounter:
    """The counts of the second cycle that decodes: the first one captures the graphs."""
    counter = LaunchCounter()
    module = take_gpu_branches(monkeypatch, counter)
    stages = {
        "extend": (PairReader, "extend"),
        "after": (DecodeBatch, "after"),
        "propose": (MultiStep, "propose"),
        "build_tree": (multi_step, "organize_draft_results"),
        "estimates": (AcceptanceEstimates, "estimate"),
        "verify": (Verifier, "verify"),
        "layer": (DecoderLayer, "forward"),
        "accept": (Lossless, "accept"),
        "keep": (Verifier, "keep"),
        "record": (Worker, "_record"),
        "emit": (Cycle, "start_copy"),
    }
    for stage, place in stages.items():
        counter.watch(monkeypatch, *place, stage)
    engine = serving(monkeypatch, counter, module, **settings)
    engine.add(request(0, range(1, 9), temperature=0.7, ignore_eos=True, max_tokens=60, **sampling))
    with counter:
        for _ in range(3):
            counter.clear()
            engine.step()
    print("\n" + counter.table())
    return counter


def serving(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter, module: Emulation, **settings: Any) -> Engine:
    """An engine without warm-up."""
    for name in ("warm_up", "warm_up_mixed"):
        monkeypatch.setattr(assemble, name, lambda *_: None)
    target = random_target(layers=LAYERS, torch_dtype="bfloat16").to(torch.bfloat16)
    head = random_head(target, "EAGLE3").to(torch.bfloat16)  # type: ignore[attr-defined]
    return speculative(
        target,
        head,
        6,
        8,
        nodes=64,
        backend="flashinfer",
        graph_sizes=(1,),
        max_running_requests=2,
        stand_ins={"flashinfer": module, "recorder": CountedRecorder(counter)},
        poison=False,
        **settings,
    )


TRUNCATED = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
PAGED = {
    "propose": (80, 0),
    "build_tree": (1, 0),
    "verify": (11, 0),
    "layer": (10, 0),
    "accept": (4, 0),
    "keep": (1, 0),
    "record": (1, 0),
    "emit": (1, 0),
    "after": (1, 0),
    "extend": (22, 0),
}
CASCADE = PAGED | {
    "propose": (81, 0),
    "estimates": (2, 0),
    "verify": (15, 0),
    "layer": (11, 0),
    "accept": (7, 0),  # three of them truncate: two read each row with many programs, for one that searches
}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("sampling", "settings", "golden"),
    [({}, {}, PAGED), (TRUNCATED, {"verify_attention": "cascade", "estimating": True}, CASCADE)],
    ids=["paged", "cascade"],
)
def test_a_cycle_launches_as_many_kernels(
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    settings: dict[str, Any],
    golden: dict[str, tuple[int, int]],
) -> None:
    """Kernels and uploads by stage. `layer` is one layer of `verify`, which has the rest."""
    counter = counted(monkeypatch, sampling, **settings)
    assert counter.numbers("layer", LAYERS) == golden


# Kernels and uploads that the host launches for a mixed forward of 4 layers, without and with a graph, and the graph's.
EAGER = {"mixed": (67, 7)}
CAPTURED = {"mixed": (3, 1), "replayed": (76, 0)}


@pytest.mark.deep
def test_a_captured_mixed_forward_is_one_replay_beside_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 40 tokens beside one request. FlashInfer's plan on the host is five of the uploads."""
    counter, found = LaunchCounter(), []
    module = take_gpu_branches(monkeypatch, counter)
    engine = serving(monkeypatch, counter, module)
    counter.watch(monkeypatch, Verifier, "mixed", "mixed")
    counter.watch(monkeypatch, kernel_counts._CountedCall, "replay", "replayed")
    mixed = Verifier.mixed

    def alone(*args: Any) -> Any:
        counter.clear()
        result = mixed(*args)
        found.append({name: (kernels.total(), counter.uploads[name]) for name, kernels in counter.kernels.items()})
        return result

    monkeypatch.setattr(Verifier, "mixed", alone)
    joining = request(1, range(1, 41), max_tokens=2, ignore_eos=True)
    for _ in range(3):  # the first one plans wrappers, the second one captures
        engine.scheduler.kv.clear()
        with counter:
            run(engine, [request(0, range(1, 9), ignore_eos=True, max_tokens=20)], joining={3: [joining]})
        while engine.lacks_graphs:
            engine.capture_graph()
    assert found[0] == EAGER
    assert found[-1] == CAPTURED
