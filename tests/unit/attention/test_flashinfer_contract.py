"""The assumptions of our FlashInfer backends and of the emulation, checked against the installed FlashInfer.

No compiled kernel runs here. The Python code of the real wrappers does: constructors, plan and run. Stand-ins replace
the compiled modules and compute with the arguments that they get.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.attention.flashinfer import backend as flashinfer
from eagle_server.attention.flashinfer.backend import FlashInferAttention
from eagle_server.attention.flashinfer.forward import FlashInferBackend
from eagle_server.attention.flashinfer.mla import FlashInferMLAAttention
from eagle_server.attention.flashinfer.modules import FA3_HEAD_DIMS, load_modules
from eagle_server.attention.flashinfer.scratch import AttentionLimits
from eagle_server.attention.workspace import Workspace
from eagle_server.cache.pool import KVPool, KVShape, LatentPool
from eagle_server.ops.tree.mask import pack_tree_mask
from tests.support.flashinfer_emulation import Emulation
from tests.support.flashinfer_log import parameters
from tests.support.flashinfer_real import CUSTOM, Kernels, packbits, real_flashinfer, replace_kernels
from tests.support.paged import CPU, Case, World, causal, draft_step, mixed, replay_with, verify

LAYERS = ((0.37, 0), (0.37, 5), (0.37, 5), (0.37, 0))
LIMITS = AttentionLimits(6, 48, graph_batches=(1, 2, 4), graph_rows=(1, 3, 7))
WRAPPERS = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
)

PHASES: dict[str, Callable[[World], Case]] = {
    "prompt chunks": lambda w: causal(w, [2, 0, 5], [9, 1, 14], [9, 7, 30]),
    "a long prompt chunk": lambda w: causal(w, [3], [47], [48]),
    "draft-extend": lambda w: causal(w, [1, 4], [3, 3], [17, 4]),
    "plain decoding": lambda w: causal(w, [0, 1, 2, 3], [1] * 4, [1, 40, 16, 17]),
    "decoding, an odd batch": lambda w: causal(w, [0, 1, 2], [1] * 3, [1, 40, 16]),
    "trees": lambda w: verify(w, [0, 2, 4, 5], [0, 9, 37, 16]),
    "trees, an odd batch": lambda w: verify(w, [5, 1, 0], [3, 1, 41]),
    "trees and chunks": lambda w: mixed(verify(w, [0, 2], [0, 9]), causal(w, [5, 1, 3], [9, 1, 14], [9, 7, 30])),
    "a draft step": lambda w: draft_step(w, [4, 1], [20, 1], 2),
    "a draft step of an odd batch": lambda w: draft_step(w, [4, 1, 3], [20, 1, 8], 1),
}


pytestmark = pytest.mark.deep  # .ci/run installs FlashInfer's Python code for the deep tests


@pytest.fixture(scope="module")
def real() -> Any:
    return real_flashinfer()


def backends(world: World, module: Any, modes: str) -> FlashInferBackend:
    specs = [(layer.scale, layer.sliding_window) for layer in world.layers]
    workspace = Workspace(CPU)
    if isinstance(world.pool, LatentPool):
        return FlashInferMLAAttention(
            world.pool, workspace, heads=world.heads, specs=specs, limits=LIMITS, module=module
        )
    assert isinstance(world.pool, KVPool)
    tree = "mask" if modes == "per_node" else modes
    return FlashInferAttention(
        world.pool,
        workspace,
        heads=world.heads,
        specs=specs,
        limits=LIMITS,
        verify=tree,  # type: ignore[arg-type]
        draft=modes,  # type: ignore[arg-type]
        module=module,
    )


def new_world(modes: str, dtype: torch.dtype = torch.float32) -> World:
    if modes == "mla":
        return World([(0.1, 0)], heads=4, dim=192, rank=128, dtype=dtype)
    return World(LAYERS, dim=64, dtype=dtype)


def run(backend: FlashInferBackend, case: Case) -> tuple[Tensor, Tensor]:
    """The result of the forward, and of dense attention."""
    case.arrive()
    queries = case.queries()
    return case.run(backend.plan(case.layout).bind(case.batch), queries), case.expected(queries)


def wrapper_class(module: Any, name: str) -> Any:
    return getattr(module.mla if "MLA" in name else module, name)


def real_method(module: Any, owner: str, method: str) -> Any:
    """A method of a real wrapper. The decode wrapper's plan takes any arguments and passes them to `_plan_impl`."""
    hidden = owner == "BatchDecodeWithPagedKVCacheWrapper" and method == "plan"
    return getattr(wrapper_class(module, owner), "_plan_impl" if hidden else method)


@pytest.mark.parametrize("modes", ["mask", "cascade", "per_node", "mla"])
def test_every_call_our_backends_make_fits_the_real_signatures(real: Any, modes: str) -> None:
    emulation = Emulation(keep_calls=True)
    world = new_world(modes)
    backend = backends(world, emulation, modes)
    for phase in PHASES.values():
        run(backend, phase(world))
    made = {(call.owner, call.method) for call in emulation.log.calls}
    expected = WRAPPERS[2:] if modes == "mla" else WRAPPERS[:2]
    assert {owner for owner, _ in made} == set(expected)
    for call in emulation.log.calls:
        inspect.signature(real_method(real, call.owner, call.method)).bind(None, *call.args, **call.kwargs)
        if call.owner == "BatchDecodeWithPagedKVCacheWrapper" and call.method == "plan":
            assert len(call.args) <= 7, "optional arguments by position are deprecated"


@pytest.mark.parametrize("owner", WRAPPERS)
def test_the_emulation_names_its_parameters_as_the_real_wrappers_do(real: Any, owner: str) -> None:
    emulated = wrapper_class(Emulation(), owner)
    for method in ("__init__", "plan", "run", "workspace_size", "reset_workspace_buffer"):
        if not hasattr(emulated, method):
            continue
        theirs = real_method(real, owner, method)
        assert set(parameters(getattr(emulated, method))) <= set(parameters(theirs)), f"{owner}.{method}"


@pytest.fixture
def kernels(real: Any, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    assert real is not None
    return replace_kernels(monkeypatch)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("modes", ["mask", "cascade", "per_node", "mla"])
def test_the_real_plan_and_run_hand_the_kernels_what_they_need(
    real: Any, kernels: Kernels, modes: str, phase: str
) -> None:
    world = new_world(modes, torch.bfloat16)
    backend = backends(world, real, modes)
    for _ in range(2):
        found, expected = run(backend, PHASES[phase](world))
        assert not bool(found.isnan().any())
        assert float((found.double() - expected).abs().max()) < 0.03
    assert kernels.plans


def test_prompt_chunks_take_fa3_on_hopper_and_all_else_is_fa2(
    real: Any, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "is_hopper", lambda device: True)
    world = new_world("mask", torch.bfloat16)
    backend = backends(world, real, "mask")
    run(backend, PHASES["draft-extend"](world))
    run(backend, PHASES["trees"](world))
    run(backend, PHASES["plain decoding"](world))
    run(backend, PHASES["prompt chunks"](world))
    assert kernels.backends == {"fa2"}
    wide = World(LAYERS, dim=64, width=80, dtype=torch.bfloat16)
    backend = FlashInferAttention(
        wide.pool,  # type: ignore[arg-type]
        Workspace(CPU),
        heads=wide.heads,
        specs=LAYERS,
        limits=AttentionLimits(6, 80),
        module=real,
    )
    for _ in range(2):
        found, expected = run(backend, causal(wide, [3, 1], [70, 2], [75, 9]))
        assert float((found.double() - expected).abs().max()) < 0.03
    assert kernels.backends == {"fa2", "fa3"}


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_each_head_size_asks_for_modules_that_have_its_kernels(
    real: Any, kernels: Kernels, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's own choice between fa2 and fa3 differs in `workspace_size` and `plan`, so it must not be asked."""
    monkeypatch.setattr(flashinfer, "is_hopper", lambda device: True)
    pool = KVPool([KVShape(2, head_dim)], 65, torch.bfloat16, CPU)
    shape: dict[str, Any] = {"heads": 4, "specs": LAYERS, "limits": AttentionLimits(1, 65), "module": real}
    if head_dim in (80, 96):
        with pytest.raises(ValueError, match="choose --attention-backend torch_native"):
            FlashInferAttention(pool, Workspace(CPU), **shape)
        return
    load_modules(FlashInferAttention(pool, Workspace(CPU), draft="per_node", **shape), {4 * head_dim})
    assert kernels.backends == ({"fa2"} if head_dim == 512 else {"fa2", "fa3"})
    assert kernels.head_dims == {head_dim}
    supported = importlib.import_module("flashinfer.utils").is_fa3_prefill_head_dim_supported
    assert supported(head_dim, head_dim) == (head_dim in FA3_HEAD_DIMS)


@pytest.mark.parametrize("modes", ["mask", "cascade", "per_node", "mla"])
def test_the_real_wrappers_replay_their_first_forward_over_new_lengths(real: Any, kernels: Kernels, modes: str) -> None:
    world = new_world(modes, torch.bfloat16)
    backend = backends(world, real, modes)
    first, second = draft_step(world, [0, 1], [9, 30], 1), draft_step(world, [5, 0], [34, 2], 1, seed=1)
    captured = backend.plan(first.layout)
    first.arrive()
    first.run(captured.bind(first.batch), first.queries())
    buffers = [args[1].data_ptr() for args in kernels.plans]  # int workspaces, whose addresses a graph holds
    again = backend.plan(second.layout)
    assert again.graph_key == captured.graph_key
    planned = [args[1].data_ptr() for args in kernels.plans[len(buffers) :]]
    assert planned == (buffers if modes == "mla" else [])
    second.arrive()
    replay_with(first.batch, second.batch)
    queries = second.queries()
    found = second.run(captured.bind(first.batch), queries)
    assert float((found.double() - second.expected(queries)).abs().max()) < 0.03


def masked_wrapper(real: Any, bits: Tensor, indptr: Tensor) -> Any:
    def ints(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    return real.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(1 << 16, dtype=torch.uint8),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=ints(3),
        paged_kv_indptr_buf=ints(3),
        paged_kv_indices_buf=ints(64),
        paged_kv_last_page_len_buf=ints(2),
        custom_mask_buf=bits,
        mask_indptr_buf=indptr,
        backend="fa2",
    )


def plan_arguments(world: World) -> dict[str, Any]:
    return {
        "num_qo_heads": world.heads,
        "num_kv_heads": 2,
        "head_dim_qk": world.dim,
        "page_size": 1,
        "q_data_type": torch.bfloat16,
        "sm_scale": 1 / math.sqrt(world.dim),
    }


def test_our_packed_masks_are_those_that_plan_packs_itself(real: Any, kernels: Kernels) -> None:
    """Two requests of 8 rows over 20 and 25 slots: the second request begins at byte 20, not at element 160."""
    assert kernels is not None
    world = new_world("mask")
    case = verify(world, [0, 1], [12, 17], size=8)
    theirs, theirs_indptr = torch.zeros(64, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    ours, ours_indptr = theirs.clone(), theirs_indptr.clone()
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 8, 16], [0, 20, 45], [0] * 45, [1, 1])]
    full = torch.cat([visible.flatten() for visible in case.visible])
    masked_wrapper(real, theirs, theirs_indptr).plan(*lengths, custom_mask=full, **plan_arguments(world))
    mask = case.batch.mask
    pack_tree_mask(mask.visible, case.batch.kv_lens, ours, ours_indptr)  # type: ignore[union-attr]
    assert theirs_indptr.tolist() == ours_indptr.tolist() == [0, 20, 45]
    assert torch.equal(theirs, ours)
    packed, _ = packbits(full, torch.tensor([0, 160, 360]), "little")
    trap = theirs_indptr.clone()
    masked_wrapper(real, theirs, trap).plan(*lengths, packed_custom_mask=packed, **plan_arguments(world))
    assert trap.tolist() == [0, 160, 360], "FlashInfer has mended packed_custom_mask"


def test_plan_without_a_mask_leaves_the_mask_alone_and_run_uses_it(real: Any, kernels: Kernels) -> None:
    world = new_world("mask", torch.bfloat16)
    bits = torch.arange(64, dtype=torch.uint8)
    indptr = torch.tensor([0, 20, 45], dtype=torch.int32)
    wrapper = masked_wrapper(real, bits, indptr)
    slots = torch.zeros(64, dtype=torch.int32)
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 8, 16], [0, 20, 45])]
    wrapper.plan(*lengths, slots[:0], torch.ones(2, dtype=torch.int32), **plan_arguments(world))
    assert torch.equal(bits, torch.arange(64, dtype=torch.uint8))
    assert indptr.tolist() == [0, 20, 45]
    q = torch.zeros(16, world.heads, world.dim, dtype=torch.bfloat16)
    cache = torch.zeros(4, 1, 2, world.dim, dtype=torch.bfloat16)
    wrapper.run(q, (cache, cache), out=torch.empty_like(q))
    assert kernels.mask_modes == [CUSTOM]
    assert kernels.masks[0][0] is bits and kernels.masks[0][1] is indptr
