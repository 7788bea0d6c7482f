"""Nothing in the engine's loop waits for the device, except for the copy of a cycle's results.

On a GPU `torch.cuda.set_sync_debug_mode` says so (tests/gpu). Here every operation that would have to read a device
value, or to find out a size, is refused while the cycle runs as it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_server.models.drafts.block_edges import EdgeConfig
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.host_reads import waits
from eagle_server.speculation.static_tree import PRESETS, truncated
from eagle_server.speculation.typical import Typical
from eagle_server.worker.cycle import Cycle
from eagle_tools.training.medusa import new_heads
from tests.support.engines import random_block, random_head, random_target, request, run, speculative
from tests.support.flashinfer_emulation import Emulation
from tests.support.redrafter import random_redrafter
from tests.support.replay import FirstCallRecorder

EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "logit_bias": ((5, 1.0), (6, -2.0)),
    "allowed_token_ids": tuple(range(40)),
    "bad_words": ((3,), (4, 5), (6, 7, 8)),
    "min_tokens": 4,
    "ignore_eos": True,
    "stop_token_ids": (9,),
}


class Device(TorchDispatchMode):
    """Refuses what synchronizes a GPU, except where a real library's kernels stand on the device's side."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside and waits(func, args, kwargs or {}):
            self.refused.append(str(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def outside(self) -> Iterator[None]:
        before, self.inside = self.inside, False
        yield
        self.inside = before


def watched(monkeypatch: pytest.MonkeyPatch, device: Device, module: Emulation) -> None:
    """Pause for the emulated kernels and plans, and where the results are read."""

    def aside(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def paused(*args: Any, **kwargs: Any) -> Any:
            with device.outside():
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, paused)

    for wrapper in (module.BatchPrefillWithPagedKVCacheWrapper, module.BatchDecodeWithPagedKVCacheWrapper):
        for name in ("__init__", "plan", "run", "workspace_size"):
            aside(wrapper, name)
    aside(Cycle, "outputs")


def random_medusa(target: TargetModel) -> MedusaHeads:
    heads = new_heads(target, 3, 1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0.0, 0.1)
    return heads.requires_grad_(requires_grad=False)


def head_of(target: TargetModel, kind: str) -> Any:
    if kind == "DFLASH":
        return random_block(target, EdgeConfig("gru", 6, 7, after_root=False))
    others = {"REDRAFTER": random_redrafter, "MEDUSA": random_medusa}
    return others[kind](target) if kind in others else random_head(target, kind)


def cycles(
    monkeypatch: pytest.MonkeyPatch, topk: int, modes: dict[str, Any], kind: str = "EAGLE3"
) -> tuple[Device, int]:
    """Run mixed requests; what was refused, and how many cycles there were."""
    target, module, device = random_target(), Emulation(), Device()
    stand_ins = {"flashinfer": module, "recorder": FirstCallRecorder()}
    engine = speculative(
        target,
        None if kind == "NGRAM" else head_of(target, kind),
        3,
        topk,
        backend="flashinfer",
        graph_sizes=(1, 2, 4),
        max_running_requests=4,
        stand_ins=stand_ins,
        chunked_prefill_size=16,
        poison=False,
        **modes,
    )
    watched(monkeypatch, device, module)
    original = engine.step

    def step() -> Any:
        device.inside = True
        try:
            return original()
        finally:
            device.inside = False

    monkeypatch.setattr(engine, "step", step)
    short = {"max_tokens": 10}
    requests = [
        request(0, range(1, 30), **short),
        request(1, range(1, 9), seed=1, temperature=0.8, ignore_eos=True, **short),
        request(2, range(3, 40), seed=2, temperature=1.0, top_k=5, top_p=0.9, **short),
        request(3, range(5, 9), seed=3, temperature=0.7, min_tokens=6, **short),
        request(4, range(2, 19), seed=4, temperature=0.7, min_p=0.05, **EVERYTHING, **short),
        with_fields(request(5, range(2, 19), **EVERYTHING, **short), speculative=False),
        with_fields(request(6, range(1, 9), **short), trees=True),
    ]
    with device:
        run(engine, requests[:2], joining={2: requests[2:]})
    return device, engine.stats().cycles


TREES = (pytest.param(1, marks=pytest.mark.deep), 4)  # chains, and trees, which do all that chains do and more
CASCADE = {"verify_attention": "cascade", "draft_attention": "per_node"}


@pytest.mark.parametrize("topk", TREES)
@pytest.mark.parametrize("modes", [{}, pytest.param(CASCADE, marks=pytest.mark.deep)], ids=str)
@pytest.mark.deep
def test_no_cycle_waits_for_the_device_before_its_results_are_copied(
    monkeypatch: pytest.MonkeyPatch, topk: int, modes: dict[str, Any]
) -> None:
    device, count = cycles(monkeypatch, topk, modes)
    assert count > 5
    assert not device.refused, f"a GPU would be waited for: {sorted(set(device.refused))}"


@pytest.mark.deep
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("kind", ["REDRAFTER", "PEAGLE", "DFLASH"])
def test_no_cycle_of_other_heads_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, kind: str, topk: int) -> None:
    device, count = cycles(monkeypatch, topk, {}, kind)
    assert count > 5
    assert not device.refused, f"a GPU would be waited for: {sorted(set(device.refused))}"


@pytest.mark.deep
def test_no_cycle_with_typical_acceptance_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, count = cycles(monkeypatch, 4, {"acceptance": Typical(0.09, 0.3)})
    assert count > 5
    assert not device.refused, f"a GPU would be waited for: {sorted(set(device.refused))}"


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["NGRAM", "EAGLE3", "REDRAFTER"])
def test_no_cycle_with_ngrams_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    device, count = cycles(monkeypatch, 4, {"ngram_steps": 5}, kind)
    assert count > 5
    assert not device.refused, f"a GPU would be waited for: {sorted(set(device.refused))}"


@pytest.mark.parametrize("ngram_steps", [0, 5])
@pytest.mark.deep
def test_no_cycle_of_medusa_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, ngram_steps: int) -> None:
    choices = truncated(PRESETS["mc_sim_7b_63"], 3)
    shape = {"choices": choices, "nodes": len(choices) + 1, "ngram_steps": ngram_steps}
    device, count = cycles(monkeypatch, 10, shape, "MEDUSA")
    assert count > 5
    assert not device.refused, f"a GPU would be waited for: {sorted(set(device.refused))}"


@pytest.mark.deep
def test_a_planted_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_server.worker.verifier import Verifier

    keep = Verifier.keep

    def waits(self: Verifier, batch: Any, tree: Any, accepted: Any) -> None:
        assert accepted.accept_length.max().item() >= 0
        keep(self, batch, tree, accepted)

    monkeypatch.setattr(Verifier, "keep", waits)
    device, _ = cycles(monkeypatch, 4, {})
    assert set(device.refused) == {"aten.item.default"}
