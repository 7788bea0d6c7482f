"""Tests of the flashinfer backend only, with emulated wrappers and emulated CUDA graphs.

`test_every_drafter` shows that the backend changes no text with any drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch

from eagle_server.attention import workspace
from eagle_server.ops.dispatch import OPERATIONS
from eagle_server.ops.kv import prefill_plan
from eagle_server.ops.triton_support import HAS_TRITON
from eagle_server.request import Request
from tests.lossless.conftest import eagle_is_deep
from tests.lossless.pairs import Pair
from tests.lossless.scenes import REQUESTS, SIZES, as_on_a_gpu, check, play
from tests.lossless.test_equality import FAMILIES
from tests.support.engines import plain, random_head, random_target, request, run, speculative, tokens_of
from tests.support.kernels import take
from tests.support.scoring import NEAR_TIE, in_float64, slack

pytestmark = pytest.mark.deep  # test_every_drafter has this backend in the gate

LAUNCHED = {  # by every cycle
    *("build_kv_indices", "draft_slots", "draw_tokens", "extend_rows", "newest_rows", "next_lengths", "plan_prefill"),
    *("score_children", "select_nodes", "topk_logprobs", "truncate_rows", "walk_tree", "window_slots"),
}


@eagle_is_deep
@pytest.mark.parametrize(
    ("steps", "topk", "page", "modes"),
    [
        pytest.param(6, 8, 1, {"verify_attention": "mask", "draft_attention": "per_node"}, marks=pytest.mark.deep),
        (4, 1, 16, {}),
        (1, 4, 1, {}),
    ],
    ids=str,
)
def test_captured_cycles_with_other_trees_and_modes_give_the_plain_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], steps: int, topk: int, page: int, modes: dict[str, Any]
) -> None:
    """The mode "per_node", and the default modes."""
    settings = {"page_size": page, **as_on_a_gpu(), **modes}
    outcome, engines = play(
        "batch", lambda **given: speculative(pair.target, pair.head, steps, topk, **{**settings, **given})
    )
    check(pair.target, outcome, texts, engines)


@eagle_is_deep
@pytest.mark.parametrize("sizes", [(1, 2), *(pytest.param(s, marks=pytest.mark.deep) for s in ((), SIZES))], ids=str)
def test_batches_beyond_the_largest_graph_are_launched_eagerly_with_the_same_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], sizes: tuple[int, ...]
) -> None:
    engine = speculative(pair.target, pair.head, **as_on_a_gpu(sizes), chunked_prefill_size=32)
    outcome = run(engine, REQUESTS[:4], joining={2: REQUESTS[4:6], 3: REQUESTS[6:7], 5: REQUESTS[7:]})
    assert tokens_of(outcome) == texts
    captured = [key for key in engine.worker.verifier.graphs.keys if key[0] != "read"]  # of prompts, at any size
    assert len(captured) == 4 * len(sizes), "extend with two widths, propose and verify for each size"


@eagle_is_deep
def test_the_workspace_is_large_enough_for_batches_beyond_the_largest_graph(
    pair: Pair, texts: Mapping[str, Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace cannot grow once graphs hold its address. `_STEP` = 1: rounding up to megabytes would hide this."""
    monkeypatch.setattr(workspace, "_STEP", 1)
    assert tokens_of(run(speculative(pair.target, pair.head, **as_on_a_gpu((1, 2))), REQUESTS)) == texts


@eagle_is_deep
@pytest.mark.parametrize("modes", ["mask", "cascade"])
def test_plans_of_the_device_that_split_kv_give_the_plain_text(
    pair: Pair, texts: Mapping[str, Sequence[int]], modes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_plan, "SMALLEST_CHUNK", 8)
    settings = {"verify_attention": modes, "draft_attention": modes}
    assert tokens_of(run(speculative(pair.target, pair.head, **as_on_a_gpu(), **settings), REQUESTS)) == texts


@eagle_is_deep
def test_plain_decoding_is_captured_too(pair: Pair, texts: Mapping[str, Sequence[int]]) -> None:
    engine = plain(pair.target, **as_on_a_gpu())
    assert tokens_of(run(engine, REQUESTS)) == texts
    assert len(engine.worker.verifier.graphs.keys) == len(SIZES)


def with_windows() -> Iterator[Any]:
    """All (attention mode, family). The gate has both families and both modes of verification."""
    quick = [("cascade", "qwen2, window 5 in one layer"), ("per_node", "mistral, window 7")]
    for modes in ("mask", "cascade", "per_node"):
        for family in ("mistral, window 7", "qwen2, window 5 in one layer"):
            yield pytest.param(modes, family, marks=() if (modes, family) in quick else (pytest.mark.deep,))


@pytest.mark.parametrize(("modes", "family"), list(with_windows()))
def test_sliding_windows_count_positions_along_the_path(family: str, modes: str) -> None:
    target = random_target(48, seed=3, **FAMILIES[family])
    prompts = torch.randint(1, 48, (3, 40), generator=torch.Generator().manual_seed(8)).tolist()
    requests = [
        request(i, p[: 12 * i + 2], seed=i, temperature=0.7 * i, ignore_eos=True) for i, p in enumerate(prompts)
    ]
    expected = tokens_of(run(plain(target), requests))
    exact = in_float64(target)
    assert min(slack(exact, each, expected[each.request_id]) for each in requests) > NEAR_TIE
    chosen = {"verify_attention": "mask" if modes == "per_node" else modes, "draft_attention": modes}
    engine = speculative(target, random_head(target, "EAGLE3", draft_vocab=40), 3, 8, **as_on_a_gpu(), **chosen)
    assert tokens_of(run(engine, requests)) == expected
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: its interpreter runs the kernels on a CPU")
@pytest.mark.parametrize(
    ("pair", "topk", "sizes", "modes"),
    [  # launched eagerly, and captured
        ("EAGLE3", 1, (), "cascade and mask"),
        pytest.param("EAGLE", 1, (2,), "cascade and mask", marks=pytest.mark.deep),
        pytest.param("EAGLE3", 4, (2,), "cascade and mask", marks=pytest.mark.deep),
        pytest.param("EAGLE3", 4, (2,), "auto", marks=pytest.mark.deep),
    ],
    indirect=["pair"],
)
def test_the_gpu_kernels_in_the_cycle_give_the_plain_text(
    pair: Pair,
    texts: Mapping[str, Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
    topk: int,
    sizes: tuple[int, ...],
    modes: str,
) -> None:
    """Every operation of the cycle runs its Triton kernel, in the interpreter. Warm-up, without a result, does not."""
    asked = {} if modes == "auto" else {"verify_attention": "cascade", "draft_attention": "mask"}
    engine = speculative(pair.target, pair.head, 2, topk, **as_on_a_gpu(sizes), **asked)
    take("triton", monkeypatch)
    launched: set[str] = set()
    for name, operation in OPERATIONS.items():
        if (kernel := operation.variants.get("triton")) is not None:

            def recorded(*args: Any, name: str = name, kernel: Callable[..., Any] = kernel, **kwargs: Any) -> Any:
                launched.add(name)
                return kernel(*args, **kwargs)

            monkeypatch.setitem(operation.variants, "triton", recorded)
    short = [replace_tokens(REQUESTS[i], 5) for i in (0, 6)]  # greedy, and sampled with top-k and top-p
    outcome = tokens_of(run(engine, short))
    assert outcome == {each.request_id: texts[each.request_id][:5] for each in short}
    by_head = {"normed_pairs", "store_accepted"}
    of_trees = set() if topk == 1 else {"keep_accepted"}  # a chain needs no compaction
    if modes == "auto":
        of_trees.add("paged_attention")
    else:
        of_trees |= {"pack_tree_mask", *(["tree_block_attention"] if topk > 1 else [])}
    assert launched - by_head == LAUNCHED | of_trees


def replace_tokens(each: Request, count: int) -> Request:
    return msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, max_tokens=count))
