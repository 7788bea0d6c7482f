"""A cycle draws the same tokens with and without graphs, and synchronizes with the device once, at its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from eagle_server.engine.engine import Engine
from eagle_server.request import Request
from eagle_server.worker.budget.budget import AdaptiveBudget
from eagle_server.worker.cycle import Cycle
from tests.gpu.conftest import flashinfer_on
from tests.gpu.pairs import Pair, random_pair
from tests.gpu.ties import MARGIN, judge
from tests.support.engines import request, run, tokens_of
from tests.support.replay import FirstCallRecorder

SIZES = (1, 2, 4)
TREES = [{"steps": 4, "topk": 4, "nodes": 13}, {"steps": 3, "topk": 1, "nodes": 4}, {}]
NAMES = ["tree", "chain", "plain"]
WAYS = [
    {"verify_attention": "mask", "draft_attention": "mask"},
    {"verify_attention": "cascade", "draft_attention": "cascade"},
    {"verify_attention": "mask", "draft_attention": "per_node"},
]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 9}
GREEDY = [request(i, prompt(7 + 12 * i, i), **LONG) for i in range(3)]
SAMPLED = [request(10 + i, prompt(20 + i, i), seed=i, temperature=0.8, **LONG) for i in range(2)]
TRUNCATED = [request(20, prompt(40, 9), seed=4, temperature=1.0, top_k=9, top_p=0.9, **LONG)]
FORBIDDEN = [request(21, prompt(12, 8), seed=5, temperature=0.7, min_tokens=8, max_tokens=12)]
SCENES: dict[str, tuple[list[Request], dict[int, list[Request]]]] = {
    "greedy": (GREEDY, {}),
    "sampled": (SAMPLED, {}),
    "mixed": (GREEDY[:2] + SAMPLED[:1] + TRUNCATED, {}),
    "a batch that changes": (GREEDY[:1], {1: SAMPLED, 2: FORBIDDEN, 3: TRUNCATED, 5: GREEDY[1:]}),
}


@pytest.fixture(scope="module")
def pair(module_device: torch.device) -> Pair:
    return random_pair(module_device)


@pytest.fixture(scope="module")
def library(module_device: torch.device) -> Any:
    return flashinfer_on(module_device)


def stand_ins(pair: Pair, library: Any) -> dict[str, Any]:
    """The stand-ins of an engine: on the CPU a recorder replaces CUDA graphs."""
    graphs = {} if pair.target.embed.is_cuda else {"recorder": FirstCallRecorder()}
    return {"flashinfer": library, **graphs}


def each_tree_each_way() -> list[Any]:
    """(tree, ways): all of them. The quick round has the tree with the last way, and plain decoding with the first."""
    quick = [("tree", WAYS[-1]), ("plain", WAYS[0])]
    both = [(name, tree, ways) for name, tree in zip(NAMES, TREES, strict=True) for ways in WAYS]
    return [
        pytest.param(
            tree,
            ways,
            id=f"{name}-{'-'.join(ways.values())}",
            marks=() if (name, ways) in quick else (pytest.mark.slow,),
        )
        for name, tree, ways in both
    ]


@pytest.mark.parametrize(("tree", "ways"), each_tree_each_way())
def test_a_captured_cycle_draws_what_the_same_cycle_draws_uncaptured(
    pair: Pair, library: Any, tree: dict[str, int], ways: dict[str, str]
) -> None:
    """The uncaptured engine calls the same functions again, with the Python values of the first call."""
    asked, joining = SCENES["a batch that changes"]
    everything = [*asked, *(each for more in joining.values() for each in more)]
    texts = []
    for recorder in (stand_ins(pair, library), {"flashinfer": library, "recorder": FirstCallRecorder()}):
        engine = pair.engine(
            **tree, **ways, backend="flashinfer", graph_sizes=SIZES, chunked_prefill_size=32, stand_ins=recorder
        )
        texts.append(tokens_of(run(engine, asked, joining=joining)))
        forwards = 4 if tree else 1  # draft-extend has two widths
        stages = [key[0] for key in engine.worker.verifier.graphs.keys if key[0] != "read"]  # of prompts, at any size
        assert len(stages) == forwards * len(SIZES)
    judged = [each for each in everything if not each.sampling.top_k and not each.sampling.min_tokens]
    verdict = judge(pair.target, judged, texts[1], texts[0], MARGIN[pair.dtype])
    assert not verdict.wrong, str(verdict)
    equal = sum(texts[0][name] == texts[1][name] for name in texts[0])
    assert equal >= len(everything) - 2, str(verdict)


@pytest.mark.parametrize("tree", TREES, ids=NAMES)
def test_captured_mixed_forwards_draw_what_eager_ones_draw(pair: Pair, library: Any, tree: dict[str, int]) -> None:
    asked, joining = SCENES["a batch that changes"]
    everything = [*asked, *(each for more in joining.values() for each in more)]
    engine = pair.engine(
        **tree, backend="flashinfer", graph_sizes=SIZES, chunked_prefill_size=96, stand_ins=stand_ins(pair, library)
    )
    texts, mixed = [], 0
    for _ in range(2):
        texts.append(tokens_of(run(engine, asked, joining=joining)))
        while engine.lacks_graphs:
            engine.capture_graph()
            mixed += 1
        engine.scheduler.kv.clear()
    assert mixed
    judged = [each for each in everything if not each.sampling.top_k and not each.sampling.min_tokens]
    verdict = judge(pair.target, judged, texts[0], texts[1], MARGIN[pair.dtype])
    assert not verdict.wrong, str(verdict)


@pytest.mark.parametrize("sizes", [SIZES, pytest.param((), marks=pytest.mark.slow)], ids=["graphs", "eager"])
def test_trees_that_follow_the_load_draw_what_plain_decoding_draws(
    pair: Pair, library: Any, sizes: tuple[int, ...]
) -> None:
    """As the server runs by default: costs are measured, estimates learn, and cycles with and without drafts mix."""
    asked, joining = SCENES["a batch that changes"]
    numbers: dict[str, Any] = {"backend": "flashinfer", "graph_sizes": sizes, "chunked_prefill_size": 32}
    texts = []
    for drafts in ({}, {**TREES[0], "adaptive": True, "estimating": True}):
        own = stand_ins(pair, library) if sizes else {"flashinfer": library}
        engine = pair.engine(**drafts, **numbers, stand_ins=own)
        for _ in range(2):  # the second time with what the first one taught
            texts.append(tokens_of(run(engine, asked, joining=joining)))
    budget = engine.worker.drafting.budget
    assert isinstance(budget, AdaptiveBudget) and budget.costs.verify.at(1.0) > 0
    estimates = engine.worker.drafting.estimates
    assert estimates is not None and bool(estimates._ratios.isfinite().all())
    everything = [*asked, *(each for more in joining.values() for each in more)]
    judged = [each for each in everything if not each.sampling.top_k and not each.sampling.min_tokens]
    for text in texts[1:]:
        verdict = judge(pair.target, judged, texts[0], text, MARGIN[pair.dtype])
        assert not verdict.wrong, str(verdict)


def set_sync_mode(name: str) -> None:
    """Torch warns once that this is a prototype, and pytest makes an error of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(name)


def test_the_synchronization_mode_is_set_although_torch_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["default"]

    def as_torch_does(name: str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        modes.append(name)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", as_torch_does)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("error", "default"):
            set_sync_mode(name)
    assert modes == ["default", "error", "default"]


@contextmanager
def refusing_to_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """From the start of each cycle until its results are copied, every synchronization with the device raises."""
    gpu = engine.worker.batches.device.type == "cuda"
    modes: list[str] = []
    original, outputs = engine.worker.run, Cycle.outputs

    def mode(name: str) -> None:
        modes.append(name)
        if gpu:
            set_sync_mode(name)

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            mode("error")
            try:
                return function(*args)
            finally:
                mode("default")

        return call

    def read(copy: Cycle) -> Any:
        mode("default")
        return outputs(copy)

    with monkeypatch.context() as patched:
        patched.setattr(engine.worker, "run", refusing(original))
        patched.setattr(Cycle, "outputs", read)
        yield modes


def run_scene(engine: Engine, scene: str) -> None:
    asked, joining = SCENES[scene]
    run(engine, asked, joining=joining)


@pytest.mark.parametrize("sizes", [SIZES, pytest.param((), marks=pytest.mark.slow)], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "tree", [TREES[0], *(pytest.param(tree, marks=pytest.mark.slow) for tree in TREES[1:])], ids=NAMES
)
def test_no_cycle_waits_for_the_device_before_its_results_are_copied(
    pair: Pair, library: Any, tree: dict[str, int], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = stand_ins(pair, library) if sizes else {"flashinfer": library}
    engine = pair.engine(**tree, backend="flashinfer", graph_sizes=sizes, chunked_prefill_size=32, stand_ins=recorder)
    scenes = list(SCENES) if pair.target.embed.is_cuda else ["a batch that changes"]
    for scene in scenes:  # the first run compiles kernels and allocates workspaces
        run_scene(engine, scene)
    waits = []
    for scene in scenes:
        with refusing_to_wait(engine, monkeypatch) as modes:
            try:
                run_scene(engine, scene)
            except RuntimeError as error:
                waits.append(f"{scene}: {error}")
                engine = pair.engine(
                    **tree, backend="flashinfer", graph_sizes=sizes, chunked_prefill_size=32, stand_ins=recorder
                )
        assert modes[0] == "error"
    assert not waits


def test_a_planted_wait_is_noticed(pair: Pair, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair.engine(**TREES[0], backend="flashinfer", stand_ins={"flashinfer": library})
    run_scene(engine, "greedy")
    keep = engine.worker.verifier.keep

    def waits(batch: Any, tree: Any, accepted: Any) -> None:
        assert accepted.accept_length.max().item() >= 0
        keep(batch, tree, accepted)

    monkeypatch.setattr(engine.worker.verifier, "keep", waits)
    with refusing_to_wait(engine, monkeypatch):
        if engine.worker.batches.device.type == "cpu":
            run_scene(engine, "greedy")
        else:
            with pytest.raises(RuntimeError, match="synchroniz"):
                run_scene(engine, "greedy")
