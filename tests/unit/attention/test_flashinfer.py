"""The FlashInfer backends with emulated kernels, and torch_native, against dense attention in float64.

Every slot that must not be read holds NaN. The emulation has the pitfalls of the real wrappers: see tests/support.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.batches import PIECE_ROWS, mixed_batch, mixed_layout, pieces_batch, pieces_layout
from eagle_server.attention.flashinfer import wrappers
from eagle_server.attention.flashinfer.backend import FlashInferAttention
from eagle_server.attention.flashinfer.forward import FlashInferBackend
from eagle_server.attention.flashinfer.mla import FlashInferMLAAttention
from eagle_server.attention.flashinfer.scratch import AttentionLimits
from eagle_server.attention.interface import AttentionBackend, LayerSpec, PagedRequests
from eagle_server.attention.torch_native import TorchNativeAttention, torch_native
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import KVPool, KVShape, LatentPool, LatentShape
from eagle_server.ops.kv import prefill_plan
from tests.support import flashinfer_planner
from tests.support.covering import covering
from tests.support.flashinfer_emulation import Emulation
from tests.support.flashinfer_paged import SMS
from tests.support.paged import CPU, Case, World, as_projected, causal, draft_step, mixed, replay_with, verify

TOLERANCE = 1e-5
LAYERS = ((0.37, 0), (0.37, 5), (0.2, 0), (0.37, 0))  # scale and sliding window; the last is like the first
FULL = ((0.37, 0), (0.2, 0))
STATIC = AttentionLimits(6, 48, graph_batches=(1, 2, 4), graph_rows=(1, 3, 7))
EAGER = AttentionLimits(6, 48)

CAUSAL: dict[str, Callable[[World], Case]] = {
    "prompt chunks": lambda w: causal(w, [2, 0, 5], [9, 1, 14], [9, 7, 30]),
    "a long prompt chunk": lambda w: causal(w, [3], [47], [48]),
    "draft-extend": lambda w: causal(w, [1, 4], [3, 3], [17, 4]),
    "a chain to verify": lambda w: causal(w, [0, 2, 3, 5], [7] * 4, [7, 20, 33, 8]),
    "a step of a drafted chain": lambda w: causal(w, [1, 5], [1, 1], [13, 40], seen=2),
    "plain decoding": lambda w: causal(w, [0, 1, 2, 3], [1] * 4, [1, 40, 16, 17]),
    "an odd batch": lambda w: causal(w, [0, 1, 2], [3] * 3, [5, 40, 16]),
}
TREES: dict[str, Callable[[World], Case]] = {
    "a tree": lambda w: verify(w, [3], [12]),
    "trees": lambda w: verify(w, [0, 2, 4, 5], [0, 9, 37, 16]),
    "trees, an odd batch": lambda w: verify(w, [5, 1, 0], [3, 1, 41]),
    "the first draft step": lambda w: draft_step(w, [1, 2], [9, 30], 0),
    "a later draft step": lambda w: draft_step(w, [4, 1], [20, 1], 2),
    "a draft step of an odd batch": lambda w: draft_step(w, [4, 1, 3], [20, 1, 8], 1),
}
MIXED: dict[str, Callable[[World], Case]] = {
    "trees and chunks": lambda w: mixed(verify(w, [0, 2], [0, 9]), causal(w, [5, 1, 3], [9, 1, 14], [9, 7, 30])),
    "chains and a chunk": lambda w: mixed(causal(w, [0, 2], [3, 3], [17, 4]), causal(w, [1], [47], [48])),
    "roots and a row": lambda w: mixed(causal(w, [4, 2, 0], [1, 1, 1], [1, 40, 16]), causal(w, [3], [1], [1])),
}
PHASES = CAUSAL | TREES | MIXED
MODES = {
    "paged": ("paged", "paged"),
    "mask": ("mask", "mask"),
    "cascade": ("cascade", "cascade"),
    "per_node": ("mask", "per_node"),
}


@dataclass
class Built:
    backend: FlashInferBackend
    emulation: Emulation


def flashinfer(
    world: World, limits: AttentionLimits, modes: str = "mask", *, keep_calls: bool = False, sms: int = SMS
) -> Built:
    assert isinstance(world.pool, KVPool)
    emulation = Emulation(keep_calls=keep_calls, sms=sms)
    verify_mode, draft_mode = MODES.get(modes, (modes, modes))
    specs = [(layer.scale, layer.sliding_window) for layer in world.layers]
    backend = FlashInferAttention(
        world.pool,
        Workspace(CPU),
        heads=world.heads,
        specs=specs,
        limits=limits,
        verify=verify_mode,  # type: ignore[arg-type]
        draft=draft_mode,  # type: ignore[arg-type]
        module=emulation,
    )
    return Built(backend, emulation)


def mla(world: World, limits: AttentionLimits) -> Built:
    assert isinstance(world.pool, LatentPool)
    emulation = Emulation()
    specs = [(layer.scale, layer.sliding_window) for layer in world.layers]
    backend = FlashInferMLAAttention(
        world.pool, Workspace(CPU), heads=world.heads, specs=specs, limits=limits, module=emulation
    )
    return Built(backend, emulation)


def latent_world() -> World:
    return World(FULL, heads=4, dim=12, rank=8)


BACKENDS: dict[str, Callable[[World], AttentionBackend]] = {
    "torch_native": lambda w: torch_native(w.pool),
    "torch_native without a compiler": lambda w: TorchNativeAttention(w.pool),
    **{
        f"flashinfer, {modes}, {name}": lambda w, limits=limits, modes=modes: flashinfer(w, limits, modes).backend  # type: ignore[misc]
        for modes in MODES
        for name, limits in (("eager", EAGER), ("static", STATIC))
    },
}


def error(found: Tensor, expected: Tensor) -> float:
    assert not bool(found.isnan().any()), "an unwritten slot was read"
    return float((found.double() - expected).abs().max())


def attend(backend: AttentionBackend, case: Case) -> float:
    """Run the forward and return its error."""
    case.arrive()
    queries = case.queries()
    return error(case.run(backend.plan(case.layout).bind(case.batch), queries), case.expected(queries))


@pytest.mark.parametrize(
    ("name", "phase", "heads", "kv_heads"), covering(BACKENDS, PHASES, [(4, 4), (4, 2), (6, 1)], together=2)
)
def test_every_backend_gives_dense_attention_in_every_phase(name: str, phase: str, heads: int, kv_heads: int) -> None:
    world = World(LAYERS, heads=heads, kv_heads=kv_heads)
    backend = BACKENDS[name](world)
    for _ in range(2):
        assert attend(backend, PHASES[phase](world)) < TOLERANCE


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["torch_native", "eager", "static"])
def test_latent_attention_gives_dense_attention_in_every_phase(name: str, phase: str) -> None:
    world = latent_world()
    limits = EAGER if name == "eager" else STATIC
    backend = torch_native(world.pool) if name == "torch_native" else mla(world, limits).backend
    for _ in range(2):
        assert attend(backend, PHASES[phase](world)) < TOLERANCE


PAIRS: dict[str, Callable[[World], tuple[Case, Case]]] = {
    "decoding": lambda w: (causal(w, [0, 1], [1, 1], [9, 30]), causal(w, [5, 3], [1, 1], [31, 2])),
    "draft-extend": lambda w: (causal(w, [0, 1], [3, 3], [9, 30]), causal(w, [2, 4], [3, 3], [40, 3])),
    "a tree": lambda w: (verify(w, [0, 1], [9, 30]), verify(w, [5, 2], [33, 1], seed=1)),
    "a draft step": lambda w: (draft_step(w, [0, 1], [9, 30], 2), draft_step(w, [5, 0], [34, 2], 2, seed=1)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("modes", [*MODES, "mla"])
@pytest.mark.parametrize("splits", [False, True])
def test_the_first_forward_of_a_key_replays_for_other_requests_and_lengths(
    modes: str, pair: str, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a CUDA graph: call bind and run of the first forward again, with new contents in its tensors."""
    if splits:
        monkeypatch.setattr(prefill_plan, "SMALLEST_CHUNK", 4)
    world = latent_world() if modes == "mla" else World(LAYERS)
    built = mla(world, STATIC) if modes == "mla" else flashinfer(world, STATIC, modes)
    first, second = PAIRS[pair](world)
    captured = built.backend.plan(first.layout)
    assert captured.graph_key is not None
    first.arrive()
    queries = first.queries()
    for _ in range(2):  # a warm-up, and the capture
        assert error(first.run(captured.bind(first.batch), queries), first.expected(queries)) < TOLERANCE
    made, plans = built.emulation.log.made, built.emulation.log.plans
    again = built.backend.plan(second.layout)
    assert again.graph_key == captured.graph_key
    assert built.emulation.log.made == made
    assert built.emulation.log.plans == plans + (modes == "mla") * len(built.backend.specs)
    second.arrive()
    replay_with(first.batch, second.batch)
    queries = second.queries()
    assert error(second.run(captured.bind(first.batch), queries), second.expected(queries)) < TOLERANCE


@pytest.mark.parametrize(("modes", "phase"), covering(MODES, PHASES, together=1))
def test_forwards_that_split_kv_give_dense_attention(modes: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_plan, "SMALLEST_CHUNK", 4)
    monkeypatch.setattr(flashinfer_planner, "SMALLEST_CHUNK", 4)
    world = World(LAYERS)
    backend = flashinfer(world, STATIC, modes).backend
    for _ in range(2):
        assert attend(backend, PHASES[phase](world)) < TOLERANCE


@pytest.mark.parametrize("bound", [-9, 0, 4, 9])
def test_a_plan_for_other_lengths_gives_wrong_results(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an upper bound of the lengths nor a lower one is safe, and the emulation shows it."""
    monkeypatch.setattr(prefill_plan, "SMALLEST_CHUNK", 4)

    def planted(kv_indptr: Tensor, plan: prefill_plan.PrefillPlan) -> None:
        prefill_plan.plan_prefill(kv_indptr + bound * torch.arange(len(kv_indptr), dtype=torch.int32), plan)
        plan.kv_indptr.copy_(kv_indptr)

    monkeypatch.setattr(wrappers, "plan_prefill", planted)
    world = World(FULL)
    case = verify(world, [3, 1], [12, 9])
    case.arrive()
    queries = case.queries()
    found = case.run(flashinfer(world, STATIC).backend.plan(case.layout).bind(case.batch), queries)
    differs = (found.double() - case.expected(queries)).abs().nan_to_num(1.0)
    assert bool((differs < TOLERANCE).all()) == (bound == 0)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("modes", MODES)
def test_where_tiles_fill_the_device_no_kv_is_split(modes: str, pair: str) -> None:
    world = World(LAYERS)
    built = flashinfer(world, STATIC, modes, sms=1, keep_calls=True)
    first, second = PAIRS[pair](world)
    captured = built.backend.plan(first.layout)
    plans = [call for call in built.emulation.log.calls if call.method == "plan"]
    split = [call.kwargs.get("disable_split_kv", False) for call in plans]
    assert split == [False, True] * sum(map(bool, captured.wrappers))
    first.arrive()
    assert error(first.run(captured.bind(first.batch), queries := first.queries()), first.expected(queries)) < TOLERANCE
    built.backend.plan(second.layout)
    second.arrive()
    replay_with(first.batch, second.batch)
    queries = second.queries()
    assert error(second.run(captured.bind(first.batch), queries), second.expected(queries)) < TOLERANCE
    assert built.emulation.log.plans == len(plans)


def test_graph_keys_tell_forwards_apart() -> None:
    world = World(LAYERS)
    backend = flashinfer(world, STATIC, "per_node").backend
    cases = [
        causal(world, [0, 1], [1, 1], [9, 30]),
        causal(world, [0, 1], [1, 1], [9, 30], seen=2),
        causal(world, [0], [1], [9]),
        causal(world, [0, 1], [3, 3], [9, 30]),
        verify(world, [0, 1], [9, 30]),
        draft_step(world, [0, 1], [9, 30], 0),
        draft_step(world, [0, 1], [9, 30], 1),
    ]
    keys = [backend.plan(case.layout).graph_key for case in cases]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    ragged = causal(world, [0, 1], [3, 4], [9, 30])
    odd_batch = causal(world, [0, 1, 2], [3, 3, 3], [9, 30, 5])
    odd_rows = causal(world, [0, 1], [2, 2], [9, 30])
    assert [backend.plan(case.layout).graph_key for case in (ragged, odd_batch, odd_rows)] == [None] * 3


@pytest.mark.parametrize("limits", [EAGER, STATIC], ids=["eager", "static"])
@pytest.mark.parametrize("modes", MODES)
def test_draft_steps_are_planned_together_and_run_in_turn(modes: str, limits: AttentionLimits) -> None:
    world = World(LAYERS)
    backend = flashinfer(world, limits, modes).backend
    cases = [draft_step(world, [4, 1], [20, 6], step) for step in range(3)]
    plans = [backend.plan(case.layout) for case in cases]
    for case, plan in zip(cases, plans, strict=True):
        case.arrive()
        queries = case.queries()
        assert error(case.run(plan.bind(case.batch), queries), case.expected(queries)) < TOLERANCE


@pytest.mark.parametrize("limits", [EAGER, STATIC], ids=["eager", "static"])
def test_steps_of_a_drafted_chain_are_planned_together_too(limits: AttentionLimits) -> None:
    world = World(LAYERS)
    backend = flashinfer(world, limits).backend
    cases = [causal(world, [4, 1], [1, 1], [20 + step, 6 + step], seen=step + 1) for step in range(3)]
    plans = [backend.plan(case.layout) for case in cases]
    for case, plan in zip(cases, plans, strict=True):
        case.arrive()
        queries = case.queries()
        assert error(case.run(plan.bind(case.batch), queries), case.expected(queries)) < TOLERANCE


def test_two_forwards_of_one_key_cannot_be_planned_at_once_by_the_host() -> None:
    world = World(LAYERS, heads=2)  # without tensor cores FlashInfer's decode has a planner of its own
    backend = flashinfer(world, STATIC).backend
    case = causal(world, [4, 1], [1, 1], [20, 6])
    early = backend.plan(case.layout)
    backend.plan(case.layout)
    with pytest.raises(RuntimeError, match="planned again before this one"):
        early.bind(case.batch)


def test_two_forwards_of_one_key_can_be_planned_at_once_if_the_device_plans() -> None:
    world = World(LAYERS)
    backend = flashinfer(world, STATIC).backend
    cases = [causal(world, [4, 1], [1, 1], lengths) for lengths in ([20, 6], [9, 40])]
    plans = [backend.plan(case.layout) for case in cases]
    for case, plan in zip(cases, plans, strict=True):
        case.arrive()
        queries = case.queries()
        assert error(case.run(plan.bind(case.batch), queries), case.expected(queries)) < TOLERANCE


def test_a_forward_cannot_run_after_another_was_bound() -> None:
    world = World(LAYERS)
    backend = flashinfer(world, EAGER).backend
    case, other = causal(world, [4, 1], [1, 1], [20, 6]), verify(world, [0, 1], [9, 30])
    case.arrive()
    bound = backend.plan(case.layout).bind(case.batch)
    backend.plan(other.layout).bind(other.batch)
    with pytest.raises(RuntimeError, match="another forward of this backend was bound"):
        case.run(bound, case.queries())


@pytest.mark.deep
def test_borrowed_wrappers_come_back() -> None:
    world = World(LAYERS)
    built = flashinfer(world, EAGER)
    made = set()
    for length in range(9, 15):
        assert attend(built.backend, causal(world, [0, 1], [3, 4], [length, 30])) < TOLERANCE
        assert attend(built.backend, verify(world, [0, 1], [length, 30])) < TOLERANCE
        gc.collect()
        made.add(built.emulation.log.made)
    assert len(made) == 1
    distinct = len(set(LAYERS))
    assert built.emulation.log.plans == (6 + 1) * distinct, "masked forwards are planned on the device"
    assert built.emulation.log.runs == 6 * 2 * len(LAYERS)


def test_auto_cascades_where_contexts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_server.attention.flashinfer.backend.CASCADE_FROM", 40)
    world = World(LAYERS)
    backend = flashinfer(world, STATIC, "auto").backend
    short, long = (backend.plan(verify(world, [0, 1], [9, n]).layout) for n in (32, 33))
    assert short.modes == ("paged", "paged", "paged")
    assert long.modes == ("cascade", "paged", "cascade")  # a sliding window is counted by depth: not by a cascade
    assert short.graph_key != long.graph_key


def test_masks_take_no_detour_over_plan() -> None:
    world = World(LAYERS)
    built = flashinfer(world, STATIC, keep_calls=True)
    assert attend(built.backend, verify(world, [0, 1], [9, 30])) < TOLERANCE
    plans = [call for call in built.emulation.log.calls if call.method == "plan"]
    assert len(plans) == 3
    for call in plans:
        assert "custom_mask" not in call.kwargs and "packed_custom_mask" not in call.kwargs
        assert call.kwargs["window_left"] == -1 and call.kwargs["causal"] is False
        assert len(call.args[2]) == 0  # the slots come later


def test_backends_share_one_workspace_that_must_not_move_under_graphs() -> None:
    worlds = [World(LAYERS), World(FULL, heads=8, kv_heads=8), latent_world()]
    paged = [flashinfer(world, STATIC, keep_calls=True) for world in worlds[:2]]
    built = [*paged, mla(worlds[2], STATIC)]
    workspace = built[0].backend.workspace
    for each in built:
        each.backend.workspace = workspace
    cases = [causal(world, [0], [3], [9]) for world in worlds]
    for _ in range(2):
        for each, case in zip(built, cases, strict=True):
            assert attend(each.backend, case) < TOLERANCE
        for each in paged:
            given = [call.args[0] for call in each.emulation.log.calls if call.method == "reset_workspace_buffer"]
            assert given[-1] is workspace.buffer
        before = workspace.buffer
        workspace.require(before.numel() + 1)
        assert workspace.buffer.numel() > before.numel()
    workspace.freeze()
    with pytest.raises(RuntimeError, match=r"before freeze\(\)"):
        workspace.require(workspace.buffer.numel() + 1)


def test_forwards_beyond_the_limits_are_refused() -> None:
    world = World(LAYERS)
    backend = flashinfer(world, AttentionLimits(2, 40)).backend
    with pytest.raises(ValueError, match="3 requests over up to 9 slots: buffers were made for 2 requests of 40"):
        backend.plan(causal(world, [0, 1, 2], [1, 1, 1], [9, 9, 9]).layout)
    with pytest.raises(ValueError, match="up to 41 slots"):
        backend.plan(causal(world, [0], [1], [41]).layout)


def test_layers_the_backend_does_not_know_are_refused() -> None:
    world = World(LAYERS)
    case = causal(world, [0], [1], [9])
    bound = flashinfer(world, EAGER).backend.plan(case.layout).bind(case.batch)
    zeros = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="not for LayerSpec"):
        bound.run(torch.zeros(1, 4, 8), zeros, zeros, LayerSpec(0, 0.5))


def test_what_flashinfer_cannot_compute_is_refused_with_a_way_out() -> None:
    class Real:
        """FlashInfer without the emulation's any_dtype and any_head_dim."""

    pool, workspace = KVPool([KVShape(2, 128)], 8, torch.float32, CPU), Workspace(CPU)
    with pytest.raises(ValueError, match=r"not torch.float32: choose --dtype bfloat16"):
        FlashInferAttention(pool, workspace, heads=4, specs=FULL, limits=EAGER, module=Real())
    latents = LatentPool([LatentShape(512, 64)], 8, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"not torch.float32"):
        FlashInferMLAAttention(latents, workspace, heads=4, specs=FULL, limits=EAGER, module=Real())
    pool = KVPool([KVShape(2, 96)], 8, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="not 96"):
        FlashInferAttention(pool, workspace, heads=4, specs=FULL, limits=EAGER, module=Real())
    with pytest.raises(ValueError, match="no sliding windows"):
        FlashInferMLAAttention(latents, workspace, heads=4, specs=LAYERS, limits=EAGER, module=Emulation())


@pytest.mark.parametrize("name", ["mask", "cascade", "latent"])
def test_padding_of_pieces_reads_a_slot_of_its_chunk_whatever_the_page_table_names_there(name: str) -> None:
    """Behind a chunk the page table may name slots of requests that have left. Here they hold NaN, and slot 0 too."""
    world = latent_world() if name == "latent" else World(LAYERS)
    backend = mla(world, STATIC).backend if name == "latent" else flashinfer(world, STATIC, name).backend
    trees, chunk = verify(world, [0, 2], [0, 9]), causal(world, [5], [5], [14])
    layout = pieces_layout([(9, 5)], count=2)
    slots = torch.zeros(2 * PIECE_ROWS, dtype=torch.int64)
    slots[:5] = chunk.batch.out_cache_loc
    row_slots = slots.clone()
    row_slots[5:PIECE_ROWS] = slots[4]
    requests = PagedRequests(torch.tensor([5, 1]), torch.tensor(layout.kv_lens), world.req_to_token)
    batch = mixed_batch(
        trees.batch, pieces_batch(requests, slots, row_slots, layout), mixed_layout(trees.layout, layout)
    )
    both = mixed(trees, chunk)
    both.arrive()
    queries, padding = both.queries(), 2 * PIECE_ROWS - 5
    plan = backend.plan(batch.layout)
    assert plan.graph_key is not None and plan.graph_key == backend.key_of(batch.layout)
    bound, found = plan.bind(batch), []
    for layer in world.layers:
        k, v = (
            torch.cat([x[layer.index, row, p.start : p.stop] for row, p in both.new])
            for x in (world.keys, world.values)
        )
        rows = (F.pad(x, (0, 0, 0, 0, 0, padding), value=torch.nan) for x in (queries[layer.index], k, v))
        found.append(bound.run(*as_projected(*rows), layer))
    out = torch.stack(found)
    assert error(out[:, : len(queries[0])], both.expected(queries)) < TOLERANCE
