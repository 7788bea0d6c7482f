"""The command that trains a ReDrafter head: it resumes, draws curves, and writes a head that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_tools.training.__main__ import main
from eagle_tools.training.loop import read_history
from eagle_tools.training.tiny import tiny_pair


@pytest.mark.training
@pytest.mark.slow
def test_a_head_is_trained_in_two_sittings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair, out = tiny_pair(tmp_path, kind="eagle", steps=1, context=64), tmp_path / "head"
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    command = ["redrafter", "--target", str(pair.target), "--data", str(tmp_path / "text.txt"), "--out", str(out)]
    settings = [
        "--length",
        "24",
        "--rollout",
        "3",
        "--sampled-texts",
        "8",
        "--device",
        "cpu",
        "--peak",
        "0.01",
        "--loss",
        "tv",
    ]
    for steps in (1, 3):
        assert main([*command, *settings, "--steps", str(steps)]) == 0
    assert "redrafter-loss.png" in capsys.readouterr().out
    training = out / "training"
    assert (training / "redrafter-loss.png").is_file()
    curves = read_history(training / "redrafter-history.json").curves
    assert [step for step, _ in curves["held-out loss"]] == [1, 3]
    assert {"train loss", "T=0 step 3", "T=1 accept length"} <= set(curves)
    assert json.loads((out / "config.json").read_text())["model_type"] == "recurrent_drafting_drafter"
    target = load_target(pair.target, Loading(progress=False), dtype="float32")
    assert load_draft(out, target, Loading(context=64, progress=False)).algorithm == "REDRAFTER"
    assert main([*command, *settings, "--steps", "3", "--draft-layers", "1"]) == 2
    assert "another --out" in capsys.readouterr().err
