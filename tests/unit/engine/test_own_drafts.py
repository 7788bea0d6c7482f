"""MTP layers in the target's own files draft without an option, unless something else was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from eagle_server.__main__ import _dry_run
from eagle_server.config import Config, parse_args
from eagle_server.engine.assembly.from_config import build_engine, with_own_drafts
from tests.support import deepseek
from tests.support.deepseek import DEEPSEEK, GLM, LAYERS
from tests.support.engines import request, run, tokens_of

FAMILIES = {"DeepSeek": DEEPSEEK, "GLM": GLM}
PROJECTION = f"model.layers.{LAYERS}.eh_proj.weight"


def options(directory: Path, *flags: str) -> Config:
    sizes = ("--context-length", "128", "--max-total-tokens", "1024", "--cpu-threads", "1")
    return parse_args(["--model-path", str(directory), *sizes, *flags], environ={})


def saved(directory: Path, base: dict[str, Any] = DEEPSEEK, *, mtp: bool = True) -> Path:
    target, head = deepseek.random_pair(3, base)
    return deepseek.save(target, head if mtp else None, directory, base)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_draft_and_change_no_text(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved(tmp_path / "target", FAMILIES[family])
    requests = [request(i, list(range(3 + i, 9 + 2 * i)), max_tokens=40, ignore_eos=True) for i in range(3)]
    with caplog.at_level("INFO"):
        engine = build_engine(options(directory), progress=False)
    assert (
        "own files hold an MTP layer (NEXTN), which drafts; --speculative-algorithm NONE: plain decoding" in caplog.text
    )
    ready = engine.ready()
    assert ready.speculative_algorithm == ready.resolved["speculative"]["algorithm"] == "NEXTN"
    texts = tokens_of(run(engine, requests))
    assert engine.stats().drafted_tokens > 0
    alone = build_engine(options(directory, "--speculative-algorithm", "NONE"), progress=False)
    assert alone.ready().speculative_algorithm == "NONE"
    assert texts == tokens_of(run(alone, requests))


@pytest.mark.parametrize("flags", [("--speculative-algorithm", "NONE"), ("--speculative-algorithm", "NGRAM")])
def test_what_was_asked_for_stays(flags: tuple[str, ...], tmp_path: Path) -> None:
    config = options(saved(tmp_path / "target"), *flags)
    assert with_own_drafts(config) is config


def test_a_target_without_such_layers_decodes_plainly(tmp_path: Path) -> None:
    config = options(saved(tmp_path / "target", mtp=False))
    assert with_own_drafts(config) is config
    demo = parse_args([], environ={})
    assert with_own_drafts(demo) is demo  # it has a head of its own


def test_a_dry_run_says_so(tmp_path: Path) -> None:
    shown = _dry_run(options(saved(tmp_path / "target"), "--device", "cpu"))
    assert (shown["speculative"]["algorithm"], shown["speculative"]["num_steps"]) == ("NEXTN", 3)
    plain = _dry_run(options(tmp_path / "target", "--device", "cpu", "--speculative-algorithm", "NONE"))
    assert shown["memory"]["target_weights"] > plain["memory"]["target_weights"]
    assert shown["memory"]["kv_per_token"] > plain["memory"]["kv_per_token"]


def test_layers_that_cannot_draft_are_named_and_the_target_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two layers are declared, and one is there."""
    directory = saved(tmp_path / "target")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    engine = build_engine(options(directory), progress=False)
    assert engine.ready().speculative_algorithm == "NONE"
    assert f"cannot be used: {directory}: 2 MTP layers are expected, but there is no model.layers.3" in caplog.text


def test_those_of_a_model_that_transformers_runs_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "num_hidden_layers": LAYERS}
    olmo = CONFIG_MAPPING["olmo2"](**shape, num_attention_heads=4, eos_token_id=0, pad_token_id=None)
    AutoModelForCausalLM.from_config(olmo).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), PROJECTION: torch.ones(64, 128)}, file, metadata={"format": "pt"})
    assert not with_own_drafts(options(tmp_path)).speculates
    assert "transformers' code runs Olmo2ForCausalLM, and its MTP layers are not supported" in caplog.text
    with pytest.raises(ValueError, match="runs Olmo2ForCausalLM, and its MTP layers are not supported"):
        build_engine(options(tmp_path, "--speculative-algorithm", "NEXTN"), progress=False)
