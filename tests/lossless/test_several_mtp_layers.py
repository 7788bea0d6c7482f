"""MiMo-V2-Flash and Step 3.5 Flash: three MTP layers draft chains and trees, and no text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.ops.linear.quantize import Quantization
from tests.lossless.scenes import as_on_a_gpu
from tests.support import mimo_v2, step3p5
from tests.support.covering import covering
from tests.support.engines import CONTEXT, MARGIN, admit_without_reserve, plain, request, run, speculative, tokens_of

VOCABULARY = 12  # few tokens, so that untrained drafts are accepted now and then
REQUESTS = [
    request(
        i,
        torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(i)).tolist(),
        temperature=(0.0, 0.8)[i % 2],
        seed=i,
        max_tokens=20 + i,
        ignore_eos=True,
    )
    for i, length in enumerate([41, 7, 90, 1, 33, 2])
]
SCENES: dict[str, dict[str, Any]] = {
    "chunked prompts": {"chunked_prefill_size": 9},
    "preempted": {"max_total_tokens": 240, "page_size": 4},
    "emulated graphs": as_on_a_gpu(),
}


@pytest.fixture(scope="module", params=[mimo_v2, step3p5], ids=["mimo-v2", "step3p5"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mtp")
    request.param.write_with_mtp(directory, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    return directory


@pytest.mark.parametrize(
    ("steps", "topk", "form"), covering([(3, 1), (4, 3)], ["float32", "bfloat16", "int8"], together=1)
)
def test_drafts_of_its_layers_change_no_text(directory: Path, form: str, steps: int, topk: int) -> None:
    """Levels below the third repeat the last layer. Prompts again, from the prefix cache."""
    dtype: Any = "float32" if form == "int8" else form
    rounding: Quantization | None = "int8" if form == "int8" else None
    how = Loading(context=CONTEXT, lookahead=MARGIN, progress=False, quantization=rounding)
    target = load_target(directory, how, dtype=dtype)
    head = load_draft(directory, target, how, target_path=directory)
    expected = {}
    for each in REQUESTS:
        expected |= tokens_of(run(plain(target), [each]))  # type: ignore[arg-type]
    for name, given in SCENES.items():
        if form != "float32" and name == "emulated graphs":
            continue  # torch's products, which are rounded otherwise
        engine = speculative(target, head, steps, topk, **given)  # type: ignore[arg-type]
        admit_without_reserve(engine.scheduler)
        for _ in range(2):
            assert tokens_of(run(engine, REQUESTS[:3], joining={2: REQUESTS[3:]})) == expected, name
        assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
