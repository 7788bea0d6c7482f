"""A block drafter whose layers all have windows accepts as much beyond four of them as beyond the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.worker.cycle import Cycle
from tests.lossless.scenes import as_on_a_gpu
from tests.support.blocks import BlockSpec, block_tensors, planted_target, qwen3, trained_block, write_block
from tests.support.engines import CONTEXT, MARGIN, request, run, speculative

WINDOW, ROWS, MASK = 8, 5, 11
UNREAD = 1e-6  # scale of the root's embedding: drafts must be read from the context


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return planted_target()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, target: TargetModel) -> Path:
    """A block drafter that must find the last token of the context, trained on texts of up to five windows."""
    tensors = block_tensors(target, 1)
    spec = BlockSpec(tensors, (1,), False, (WINDOW,) * 2, (True,) * 2, MASK, {"embed_scale": UNREAD})
    trained_block(spec, target, block_size=ROWS, steps=240)
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW, "use_sliding_window": True}
    flags = {"mask_token_id": MASK, "target_layer_ids": [0], "input_embedding_scale": UNREAD}
    config = qwen3(target, block_size=ROWS, dflash_config=flags, **windows)
    return write_block(tmp_path_factory.mktemp("windows"), tensors, config)


def captured() -> dict[str, Any]:
    return {**as_on_a_gpu(), "max_running_requests": 16}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict, pytest.param(captured, marks=pytest.mark.deep)])
def test_as_much_is_accepted_beyond_four_windows(
    target: TargetModel, files: Path, settings: Callable[[], dict[str, Any]]
) -> None:
    first, later = accepted_of(target, files, settings())
    assert first > 0.75 * (ROWS - 1)
    assert later >= 0.9 * first


@pytest.mark.slow
def test_windows_that_are_ignored_are_seen(target: TargetModel, files: Path) -> None:
    _, later = accepted_of(target, files, {}, {"use_sliding_window": False, "is_causal": True})
    assert later < 0.5


def accepted_of(
    target: TargetModel, files: Path, settings: dict[str, Any], overrides: dict[str, Any] | None = None
) -> tuple[float, float]:
    """Accepted drafts per cycle after contexts of one to two windows, and of four to eight."""
    how = Loading(context=CONTEXT, lookahead=MARGIN, progress=False)
    head: Any = load_draft(files, target, how, overrides=overrides)
    engine, first, later = speculative(target, head, ROWS - 1, 1, **settings), list[int](), list[int]()

    def observe(cycle: Cycle) -> None:
        lengths = cycle.accepted.accept_length.tolist()  # a captured batch ends with padding
        for decode, accepted in zip(cycle.plan.decodes, lengths, strict=False):
            if WINDOW <= decode.seq_len < 2 * WINDOW:
                first.append(accepted)
            elif 4 * WINDOW <= decode.seq_len < 8 * WINDOW:
                later.append(accepted)

    engine.worker.observers.append(observe)
    prompts = torch.randint(0, MASK - 1, (16, 2), generator=torch.Generator().manual_seed(1)).tolist()
    common = {"max_tokens": 9 * WINDOW, "ignore_eos": True}
    run(engine, [request(i, prompt, seed=i, temperature=i % 2, **common) for i, prompt in enumerate(prompts)])
    assert min(len(first), len(later)) > len(prompts)
    return sum(first) / len(first), sum(later) / len(later)
