"""Medusa: from options to an engine, and from training to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.config import ConfigError, parse_args
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.speculation.static_tree import PRESETS, truncated
from eagle_tools.training.__main__ import main
from eagle_tools.training.medusa import export_medusa, new_heads
from eagle_tools.training.tiny import TinyPair, tiny_pair
from tests.support.engines import FIXED_TREES, request, run

HEADS = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A tiny target and untrained heads."""
    torch.set_num_threads(1)
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), kind="eagle", steps=0)
    heads = pair.target.parent / "medusa"
    export_medusa(
        new_heads(load_target(pair.target, Loading(progress=False, pack=False)), HEADS, 1), heads, torch.float32
    )
    return TinyPair(pair.target, heads)


def build(files: TinyPair, *flags: str, draft: Path | None = None) -> Engine:
    paths = ["--model-path", str(files.target), "--speculative-draft-model-path", str(draft or files.draft)]
    paths += ["--max-total-tokens", "512", *FIXED_TREES]
    return build_engine(parse_args([*paths, *flags], environ={}), progress=False)


@pytest.mark.parametrize("flags", [[], ["--speculative-algorithm", "MEDUSA"]], ids=str)
def test_the_default_tree_is_as_deep_as_there_are_heads(files: TinyPair, flags: list[str]) -> None:
    engine = build(files, *flags)
    tree = truncated(PRESETS["mc_sim_7b_63"], HEADS)
    shown: dict[str, Any] = engine.ready().resolved["speculative"]
    assert engine.ready().speculative_algorithm == shown["algorithm"] == "MEDUSA"
    assert (shown["num_steps"], shown["eagle_topk"], shown["num_draft_tokens"]) == (3, 10, len(tree) + 1)
    assert shown["medusa_choices"] == [list(node) for node in tree]
    outcome = run(engine, [request(0, range(9), max_tokens=6, ignore_eos=True)])
    assert len(outcome["0"].tokens) == 6
    assert engine.stats().drafted_tokens >= len(tree)


def test_a_tree_may_be_a_list(files: TinyPair, tmp_path: Path) -> None:
    engine = build(files, "--medusa-choices", "[(0,), (1,), (0, 3)]")
    assert engine.ready().num_steps == 2
    assert engine.ready().resolved["speculative"]["num_draft_tokens"] == 4
    (tmp_path / "config.yaml").write_text("speculative-medusa-choices: [[0], [0, 1]]\n")
    engine = build(files, "--config", str(tmp_path / "config.yaml"))
    assert engine.ready().resolved["speculative"]["medusa_choices"] == [[0], [0, 1]]


@pytest.mark.parametrize(("flags", "nodes"), [([], 62), (["--speculative-num-draft-tokens", "80"], 80)])
def test_tries_beside_the_heads_fill_the_tree(files: TinyPair, flags: list[str], nodes: int) -> None:
    engine = build(files, "--speculative-algorithm", "MEDUSA+NGRAM", *flags)
    shown: dict[str, Any] = engine.ready().resolved["speculative"]
    assert engine.ready().speculative_algorithm == shown["algorithm"] == "MEDUSA+NGRAM"
    assert (shown["num_steps"], shown["num_draft_tokens"], shown["ngram_depth"]) == (3, nodes, 8)
    assert len(run(engine, [request(0, [*range(9), *range(9)], max_tokens=6, ignore_eos=True)])["0"].tokens) == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--medusa-choices", "mc_sim_7b_63"], "--medusa-choices: a tree of depth 4 needs as many heads, found 3"),
        (["--medusa-choices", "[(0, 0)]"], r"--medusa-choices: \(0, 0\) has no parent"),
        (["--medusa-choices", "vicuna"], "--medusa-choices: 'vicuna' is neither a list"),
        (["--speculative-num-steps", "3", "--topk", "2"], "trees follow from --medusa-choices alone"),
        (["--medusa-choices", "[(64,)]"], "the head drafts from 64 tokens"),
    ],
)
def test_trees_that_the_heads_cannot_draft_are_refused(files: TinyPair, flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(files, *flags)


def test_choices_for_another_draft_are_refused(files: TinyPair) -> None:
    with pytest.raises(ConfigError, match="--medusa-choices is for Medusa heads, but the draft's files hold an EAGLE"):
        build(files, "--medusa-choices", "zephyr_stage2", draft=files.target.parent / "eagle")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["MEDUSA", "--speculative-num-steps", "3"], "--speculative-num-steps: MEDUSA's trees follow from"),
        (["MEDUSA", "--speculative-num-draft-tokens", "3"], "--speculative-num-draft-tokens: MEDUSA's trees"),
        (["EAGLE3", "--medusa-choices", "zephyr_stage2"], "--medusa-choices has no effect with"),
        (["NONE", "--medusa-choices", "zephyr_stage2"], "--speculative-medusa-choices has no effect with"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--speculative-algorithm", *flags], environ={})
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line_trains_heads_and_resumes(
    files: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.txt").write_text("The quick brown fox jumps over the lazy dog\n" * 200)
    command = ["medusa", "--target", str(files.target), "--data", str(tmp_path / "data.txt")]
    command += ["--length", "32", "--sampled-texts", "8", "--device", "cpu", "--out", str(tmp_path / "heads")]
    assert main([*command, "--steps", "2", "--heads", "2", "--texts", "4"]) == 0
    assert main([*command, "--steps", "4", "--heads", "2", "--texts", "4"]) == 0
    assert main([*command, "--steps", "4", "--heads", "3", "--texts", "4"]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert main([*command, "--heads", "0"]) == 2
    loaded = load_draft(
        tmp_path / "heads", load_target(files.target, Loading(progress=False)), Loading(context=512, progress=False)
    )
    assert isinstance(loaded, MedusaHeads)
    assert loaded.config.heads == 2
    assert (tmp_path / "heads" / "training" / "medusa-loss.png").is_file()
