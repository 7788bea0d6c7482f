"""Which weights a training keeps: those with the longest accept length, which is what a server would count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_server.llm import LLM
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_family_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.eagle3 import Eagle3Head
from eagle_tools.training.loop import Job, best_point, train
from eagle_tools.training.packing import served_length
from eagle_tools.training.rows.row_set import CutRow, packed
from eagle_tools.training.tiny import tiny_pair
from eagle_tools.training.ttt import by_start, teach, ttt_loss
from tests.unit.training.test_training import small_job


def test_a_cycle_begins_behind_the_accepted_drafts_and_the_bonus() -> None:
    counted = torch.tensor([[[0, 1, 1, 1, 1, 1, 0, 1]], [[0, 1, 1, 1, 1, 0, 0, 0]]], dtype=torch.bool)
    hits = torch.tensor([[[1, 1, 1, 0, 1, 1, 1, 0]], [[1, 1, 0, 1, 1, 1, 1, 1]]], dtype=torch.bool)
    # Rows 1 (two are accepted) and 4 (two, which are the last). Row 7 is another answer's only one: nothing is drafted.
    assert served_length(hits, counted) == 5 / 2
    assert served_length(hits, counted & False) == 1


@pytest.mark.slow
@pytest.mark.training
def test_the_offline_accept_length_is_that_of_the_server(tmp_path: Path) -> None:
    pair = tiny_pair(tmp_path, steps=48)
    options: dict[str, Any] = {"speculative_num_steps": 3, "topk": 1, "speculative_adaptive": "off", "cpu_threads": 1}
    options |= {"speculative_draft_quantization": "none", "progress": False}  # as it is trained
    llm = LLM(str(pair.target), speculative_draft_model_path=str(pair.draft), **options)
    prompts = [[7 * i % 60, 3, i, 11 + i] for i in range(6)]
    results = llm.generate(prompts, max_tokens=40, temperature=0, ignore_eos=True)
    rows: list[CutRow] = []
    cycles = accepted = 0
    for prompt, result in zip(prompts, results, strict=True):
        ids = [*prompt, *result.outputs[0].token_ids]
        rows.append(CutRow(np.array(ids), np.arange(len(ids)) >= len(prompt)))
        assert result.metrics is not None
        cycles += result.metrics.num_spec_steps
        accepted += result.metrics.num_accepted_draft_tokens
    window, packing = packed([rows[:3], rows[3:]], 140)
    target = load_family_target(pair.target, Loading(progress=False, pack=False))
    head = load_draft(pair.draft, target, Loading(context=512, progress=False, pack=False))
    assert isinstance(head, Eagle3Head) and head.d2t is not None
    draft_ids = head.target_ids(torch.arange(len(head.d2t)))
    with torch.no_grad():
        _, hits = ttt_loss(head, teach(target, window, draft_ids, head.aux_boundaries, packing=packing), 3)
    assert served_length(by_start(hits), packing.chains(3)) == 1 + accepted / cycles > 1.2


def falling_job(directory: Path, fails_at: int | None = None) -> Job:
    """A job of two losses per step, whose second evaluation is the best."""
    job = small_job(directory, 20, fails_at)
    found = iter([1.0, 2.0, 1.5, 1.9])
    if (directory / "small-checkpoint.pt").is_file():
        next(found), next(found)
    return replace(job, evaluate=lambda: {"accept length": next(found)}, best_by="accept length", accumulate=2)


def test_the_weights_of_the_best_evaluation_stay_after_an_interruption_too(tmp_path: Path) -> None:
    whole = falling_job(tmp_path / "whole")
    history = train(whole)
    assert best_point(history, "accept length") == (10, 2.0)
    with pytest.raises(KeyboardInterrupt):
        train(falling_job(tmp_path / "parts", fails_at=25))  # in step 12, after two evaluations
    resumed = falling_job(tmp_path / "parts")
    assert train(resumed).curves == history.curves
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    last = torch.load(tmp_path / "whole" / "small-checkpoint.pt", weights_only=True)
    assert torch.equal(last["best"]["model"]["0.weight"], dict(whole.model.named_parameters())["0.weight"])
    assert not torch.equal(last["model"]["0.weight"], last["best"]["model"]["0.weight"])


def test_accumulated_losses_move_the_weights_as_their_mean_does(tmp_path: Path) -> None:
    parts = replace(small_job(tmp_path / "parts", 3), accumulate=2)
    other = small_job(tmp_path / "mean", 3)
    mean = replace(other, loss=lambda step: ((other.loss(2 * step)[0] + other.loss(2 * step + 1)[0]) / 2, {}))
    train(parts)
    train(mean)
    for a, b in zip(parts.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_weights_that_were_not_trained_end_a_training(tmp_path: Path) -> None:
    job = small_job(tmp_path, 2)
    job.model.register_parameter("unused", torch.nn.Parameter(torch.randn(3)))
    with pytest.raises(ValueError, match="small: unused: never got a gradient"):
        train(job)
