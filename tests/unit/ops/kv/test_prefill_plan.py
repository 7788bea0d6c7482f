"""The device's plan of a paged prefill: torch twin and kernel against FlashInfer's own planner and the emulated one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from eagle_server.ops.kv import prefill_plan
from eagle_server.ops.kv.prefill_plan import PrefillPlan, plan_prefill
from tests.support.flashinfer_cpp import Planner
from tests.support.flashinfer_planner import Planned, write_plan
from tests.support.kernels import DEVICE, each_variant

WORKSPACE = 1 << 18
LONGEST = 3000


def indptr(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def lengths_of(rng: random.Random, bs: int) -> list[int]:
    most = rng.choice((3, 130, 700, LONGEST))
    return [rng.randint(0, most) for _ in range(bs)]


def batches(seed: int, count: int) -> Iterator[tuple[Planned, int, int]]:
    """Heads, windows and GPUs, with batch sizes and rows per request."""
    rng = random.Random(seed)
    for _ in range(count):
        kv_heads, group = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 3, 4, 5, 7, 8, 16))
        rows, window = rng.choice((1, 1, 2, 5, 7, 8, 16, 33, 64)), rng.choice((-1, -1, -1, 0, 5, 127, 128, 1000))
        given = Planned(
            group * kv_heads, kv_heads, rng.choice((64, 128, 256, 512)), rng.choice((6, 80, 132)), True, window
        )
        yield given, rng.choice((1, 2, 3, 5, 8, 16, 24, 64, 100)), rows


def uniform(given: Planned, rows: int, *, disable: bool = False) -> Planned:
    heads = given.heads, given.kv_heads, given.dim
    return Planned(*heads, given.sms, given.graph, given.window, disable, rows)


def device_plan(given: Planned, workspace: Tensor, info: list[int], bs: int, rows: int) -> PrefillPlan:
    lengths = torch.zeros(bs + 1, dtype=torch.int32), torch.zeros(bs, dtype=torch.int32)
    lengths = tuple(each.to(workspace.device) for each in lengths)  # type: ignore[assignment]
    return PrefillPlan.of(workspace, info, lengths, rows, given.group, given.window, LONGEST)


def arrays(plan: PrefillPlan) -> dict[str, list[int]]:
    """The values that count: blocks without work are read nowhere."""
    valid = int(plan.block_valid_mask.sum())
    found = {name: value.tolist() for name, value in vars(plan).items() if isinstance(value, Tensor)}
    return found | {name: found[name][:valid] for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")}


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("planner"))


def test_the_twin_writes_what_flashinfers_planner_writes(planner: Planner) -> None:
    """The host plans other lengths once. Then the device plans these lengths as the library would."""
    rng, splits = random.Random(5), 0
    for given, bs, rows in batches(0, 3000):
        first, lens = (lengths_of(rng, bs) for _ in range(2))
        qo_indptr, given = indptr([rows] * bs), uniform(given, rows)
        expected, found = (torch.zeros(WORKSPACE, dtype=torch.uint8) for _ in range(2))
        info = planner.plan(expected, qo_indptr, indptr(lens), given)
        assert planner.plan(found, qo_indptr, indptr(first), given) == info, "offsets follow from lengths"
        theirs, ours = (device_plan(given, workspace, info, bs, rows) for workspace in (expected, found))
        plan_prefill(indptr(lens), ours)
        theirs.kv_indptr.copy_(indptr(lens))
        theirs.last_page_len.copy_(torch.tensor(lens).clamp(max=1))
        assert arrays(ours) == arrays(theirs), (given, rows, lens)
        splits += ours.kv_chunk_size.item() < max(lens)
        rows_at = info[2]
        assert torch.equal(found[rows_at : rows_at + 4], expected[rows_at : rows_at + 4])
    assert 500 < splits < 2500


def test_where_tiles_fill_the_device_the_planner_splits_nothing(planner: Planner) -> None:
    rng, seen = random.Random(6), 0
    for given, bs, rows in batches(1, 1000):
        lens, qo_indptr = lengths_of(rng, bs), indptr([rows] * bs)
        ints = torch.zeros(WORKSPACE, dtype=torch.uint8)
        info = planner.plan(ints, qo_indptr, indptr(lens), uniform(given, rows))
        plan = device_plan(given, ints, info, bs, rows)
        if not plan.fills_device:
            continue
        seen += 1
        split = arrays(plan)
        info = planner.plan(ints, qo_indptr, indptr(lens), uniform(given, rows, disable=True))
        assert not info[-1]
        plan = device_plan(given, ints, info, bs, rows)
        whole = arrays(plan)
        names = ("request_indices", "qo_tile_indices", "kv_tile_indices", "block_valid_mask", "o_indptr")
        assert [whole[name] for name in names] == [split[name] for name in names]
        assert set(split["kv_tile_indices"]) == {0} and set(split["block_valid_mask"]) == {1}
        plan_prefill(indptr(lens), plan)
        again = arrays(plan)
        assert [again[name] for name in names] == [whole[name] for name in names]
        assert again["merge_indptr"] == []
    assert seen > 100


def test_the_emulated_planner_is_flashinfers(planner: Planner) -> None:
    """For all batches that we plan: with CUDA graphs and without, with equally many rows and ragged."""
    rng = random.Random(7)
    for number, (given, bs, rows) in enumerate(batches(2, 1000)):
        lens, q_lens = lengths_of(rng, bs), [rows] * bs
        heads = given.heads, given.kv_heads, given.dim
        graph, ragged, disable = (bool(number & bit) for bit in (1, 2, 4))
        if ragged:
            q_lens = [rng.randint(1, rows) for _ in range(bs)]
        given = Planned(*heads, given.sms, graph, given.window, disable, 0 if ragged or not graph else rows)
        expected, found = (torch.zeros(WORKSPACE, dtype=torch.uint8) for _ in range(2))
        info = planner.plan(expected, indptr(q_lens), indptr(lens), given)
        assert write_plan(found, indptr(q_lens), torch.tensor(lens), given, sum(q_lens))[:15] == [
            *info[:10],
            *(0, 0),
            *info[12:],
        ]
        assert torch.equal(found, expected)


@each_variant(plan_prefill)
@pytest.mark.parametrize("smallest", [4, prefill_plan.SMALLEST_CHUNK])
def test_twin_and_kernel_write_the_emulated_planners_arrays(
    variant: str, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_plan, "SMALLEST_CHUNK", smallest)
    monkeypatch.setattr("tests.support.flashinfer_planner.SMALLEST_CHUNK", smallest)
    rng = random.Random(8)
    for given, bs, rows in batches(3, 8 if variant == "triton" else 50):  # the interpreter is slow
        lens, first, qo_indptr = lengths_of(rng, bs), lengths_of(rng, bs), indptr([rows] * bs)
        given = uniform(given, rows)
        expected, found = (torch.zeros(WORKSPACE, dtype=torch.uint8) for _ in range(2))
        info = write_plan(expected, qo_indptr, torch.tensor(lens), given, bs * rows)[:15]
        write_plan(found, qo_indptr, torch.tensor(first), given, bs * rows)
        ours = device_plan(given, found.to(DEVICE), info, bs, rows)
        plan_prefill(indptr(lens).to(DEVICE), ours)
        theirs = arrays(device_plan(given, expected, info, bs, rows))
        theirs |= {"kv_indptr": indptr(lens).tolist(), "last_page_len": [min(n, 1) for n in lens]}
        assert arrays(ours) == theirs, (given, rows, lens)
        valid = sum(theirs["block_valid_mask"])
        assert not any(
            each[valid:].any() for each in (ours.request_indices, ours.qo_tile_indices, ours.kv_tile_indices)
        )


def test_another_version_of_flashinfer_is_refused() -> None:
    lengths = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="PrefillPlanInfo has 14 entries, not 15: another version"):
        PrefillPlan.of(torch.zeros(64, dtype=torch.uint8), [0] * 14, lengths, 1, 1, -1, 9)
