"""What `--dry-run` says about memory, beside what loading really takes."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_server.__main__ import main
from eagle_server.config import DEMO_DRAFT, DEMO_TARGET, parse_args
from eagle_server.engine.assembly import devices
from eagle_server.engine.assembly import memory_estimate as module
from eagle_server.engine.assembly.from_config import load_models
from eagle_server.engine.assembly.memory_estimate import memory_estimate, most_streams, refusal, weight_bytes
from eagle_server.engine.assembly.pools import bytes_per_slot, make_states
from eagle_server.engine.assembly.resolve import resolve
from eagle_server.models.checkpoints.load_target import DtypeName, load_target, read_model_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.targets.decoder import TargetModel
from tests.support import deepseek
from tests.support.blocks import block_tensors, qwen3
from tests.support.hybrids import hybrid_config, hybrid_target
from tests.unit.models import draft_checkpoints as dc


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_take_what_the_estimate_says(dtype: DtypeName) -> None:
    estimate = memory_estimate(parse_args(["--dtype", dtype], environ={}))
    target = load_target(str(DEMO_TARGET), Loading(progress=False, pack=False), dtype=dtype)
    assert isinstance(target, TargetModel)
    assert estimate["target_weights"] == sum(view.nbytes for _, view in target.weight_views())
    assert estimate["draft_weights"] > 0
    assert estimate["fits"] is True


def test_draft_heads_in_the_targets_files_count_only_if_they_draft(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TARGET, tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    flags = ["--model-path", str(tmp_path / "target"), "--speculative-algorithm", "NONE"]
    before = memory_estimate(parse_args(flags, environ={}))["target_weights"]
    tensors = load_file(file)
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    save_file(tensors | {f"model.layers.{layers}.eh_proj.weight": torch.ones(8, 16)}, file, metadata={"format": "pt"})
    assert memory_estimate(parse_args(flags, environ={}))["target_weights"] == before


def test_rounded_weights_take_less() -> None:
    demo = str(DEMO_TARGET)
    whole, eight, four = (weight_bytes(demo, torch.bfloat16, each, native=True) for each in (None, "int8", "int4"))
    assert 0.5 * whole < eight < 0.75 * whole
    assert 0.25 * whole < four < eight


def test_kv_is_that_of_target_and_draft() -> None:
    config = parse_args([], environ={})
    models = load_models(config, progress=False)
    assert models.draft is not None
    both = bytes_per_slot(models.target.config) + bytes_per_slot(models.draft.config)  # type: ignore[union-attr]
    assert memory_estimate(config)["kv_per_token"] == both


SHAPE = {**dc.CONFIG, "num_hidden_layers": dc.LAYERS, "head_dim": 20, "architectures": ["LlamaForCausalLM"]}
SECOND = dc.layer_tensors("layers.1.", norms=("input_layernorm",))
EAGLE3 = {**dc.CONFIG, "draft_vocab_size": dc.VD}
BLOCK = {"block_size": 4, "mask_token_id": 1, "aux_hidden_state_layer_ids": [1, 4], "sample_from_anchor": False}


@pytest.mark.parametrize(
    ("tensors", "config", "layers", "streams"),
    [
        (
            block_tensors(dc.target(), 5, depth=3),
            {"speculators_model_type": "dflash", "transformer_layer_config": qwen3(dc.target(), 3), **BLOCK},
            3,
            5,
        ),
        (block_tensors(dc.target(), 2), qwen3(dc.target(), vocab_size=40, target_layer_ids=[0, 3], **BLOCK), 2, 2),
        (dc.eagle_tensors(bias=False), dc.CONFIG, 1, 2),
        (dc.eagle3_tensors() | SECOND, EAGLE3, 2, 3),
        (
            dc.eagle3_tensors() | SECOND | {"mask_hidden": torch.ones(1, 1, 3 * dc.H)},
            {"speculators_model_type": "peagle", "transformer_layer_config": EAGLE3, "mask_token_id": 1},
            2,
            3,
        ),
    ],
    ids=["speculators' block drafter", "another padded vocabulary", "EAGLE", "two layers", "P-EAGLE"],
)
def test_kv_of_a_draft_is_that_of_its_own_layers_and_its_streams_those_of_its_fc(
    tmp_path: Path, tensors: dc.Tensors, config: dict[str, Any], layers: int, streams: int
) -> None:
    """Its heads are narrower than the target's, and config.json may nest or misstate the number of layers."""
    save_checkpoint(dc.target(**SHAPE), tmp_path / "target", SHAPE, torch.float32)
    dc.write(tmp_path / "draft", tensors, config)
    paths = ["--model-path", str(tmp_path / "target"), "--speculative-draft-model-path", str(tmp_path / "draft")]
    given = parse_args([*paths, "--dtype", "float32"], environ={})
    assert memory_estimate(given)["kv_per_token"] == 2 * 4 * dc.KV * (dc.LAYERS * 20 + layers * dc.D)
    assert most_streams(given, read_model_config(tmp_path / "target")) == streams


def test_kv_of_an_mtp_layer_is_latent_where_the_targets_is(tmp_path: Path) -> None:
    target, head = deepseek.random_pair()
    path = str(deepseek.save(target, head, tmp_path))
    estimate = memory_estimate(parse_args(["--model-path", path, "--speculative-algorithm", "NEXTN"], environ={}))
    assert head.kv.mla is not None
    assert estimate["kv_per_token"] == bytes_per_slot(target.config) + bytes_per_slot(head.kv)


def test_ranks_share_weights_and_kv() -> None:
    flags = ["--device", "cpu", "--speculative-algorithm", "NONE", "--tp-size"]
    one, two = (memory_estimate(parse_args([*flags, ranks], environ={})) for ranks in ("1", "2"))
    assert two["target_weights"] == one["target_weights"] // 2
    assert two["kv_per_token"] == one["kv_per_token"] // 2
    assert two["memory"] == one["memory"] // 2
    drafting = memory_estimate(parse_args(["--device", "cpu", "--tp-size", "2"], environ={}))
    alone = memory_estimate(parse_args(["--device", "cpu"], environ={}))
    assert drafting["draft_weights"] > alone["draft_weights"], "rank 0 has the whole vocabulary for the draft"


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (2**31 + 2**20, "the weights take .* GiB, and there are .* GiB: --quantization, or a smaller model"),
        (2**31 + 50 * 2**20, "there is room for .* tokens of KV, and a request of the full context needs"),
    ],
)
def test_what_does_not_fit_is_refused(
    memory: int, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (module, devices):
        monkeypatch.setattr(each, "usable_memory", lambda: memory)
    monkeypatch.setattr(devices, "CPU_MEMORY_FOR_KV", 0.001)
    config = parse_args([], environ={})
    found = refusal(config, memory_estimate(config))
    assert found is not None and re.search(reason, found)
    pytest.raises(SystemExit, main, ["--dry-run"])
    assert capsys.readouterr().err.startswith("eagle_server: error: ")


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as status:
        main([*flags, "--dry-run"])
    assert status.value.code == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_dry_run_downloads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--model-path", "nobody/nothing", "--speculative-draft-model-path", str(DEMO_DRAFT))
    assert found["memory"] == {
        "unknown": "nobody/nothing must be on this machine; a start downloads what is on the Hub"
    }


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (5, 4, 8)),
        (["--topk", "2"], (5, 2, 11)),
        (["--speculative-num-steps", "3"], (3, 4, 13)),
        (["--speculative-num-draft-tokens", "16"], (5, 4, 16)),
        (["--speculative-algorithm", "NGRAM", "--speculative-num-steps", "3"], (3, 0, 16)),
        (["--speculative-algorithm", "MEDUSA"], (None, None, None)),
        (["--model-path", "nobody/nothing", "--speculative-algorithm", "NEXTN", "--topk", "2"], (None, 2, None)),
    ],
    ids=str,
)
def test_a_dry_run_shows_the_tree_that_is_drafted(
    flags: list[str], expected: tuple[int | None, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(capsys, *flags)["speculative"]
    assert (shown["num_steps"], shown["eagle_topk"], shown["num_draft_tokens"]) == expected


def test_a_dry_run_of_a_damaged_checkpoint_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as status:
        main(["--model-path", str(tmp_path), "--speculative-algorithm", "NONE", "--dry-run"])
    assert status.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_medusa_heads_without_a_config_are_counted(tmp_path: Path) -> None:
    save_file({"0.1.weight": torch.zeros(64, 32)}, tmp_path / "medusa_lm_head.safetensors")
    assert weight_bytes(str(tmp_path), torch.bfloat16, native=True) == 64 * 32 * 2
    flags = ["--model-path", str(DEMO_TARGET), "--speculative-draft-model-path", str(tmp_path)]
    flags += ["--speculative-algorithm", "MEDUSA", "--speculative-draft-quantization", "none"]
    estimate = memory_estimate(parse_args(flags, environ={}))
    assert (
        estimate["draft_weights"]
        == 64 * 32 * load_target(str(DEMO_TARGET), Loading(progress=False)).config.dtype.itemsize
    )


def test_states_of_recurrent_layers_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the estimate, and taken off the memory for KV. Too many requests are refused with the flag to change."""
    save_checkpoint(hybrid_target(), tmp_path, hybrid_config(), torch.float32)
    flags = ["--model-path", str(tmp_path), "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "9"]
    config = parse_args([*flags, "--max-running-requests", "3"], environ={})
    estimate, target = memory_estimate(config), load_target(tmp_path, Loading(progress=False))
    states = make_states(target.config, 3, 9, torch.device("cpu"))
    assert states is not None
    assert estimate["states"] == sum(part.nbytes for part in states.parts)
    split = memory_estimate(parse_args([*flags, "--max-running-requests", "3", "--tp-size", "2"], environ={}))
    assert split["states"] == estimate["states"] // 2
    assert estimate["kv_per_token"] == 2 * 4 * 2 * 16, "of the one layer that attends"
    one = states.states[:, 0].nbytes + states.rings[:, 0].nbytes
    assert estimate["state_checkpoints"] == one * 2 * math.ceil(estimate["kv_tokens_that_fit"] / 512)
    without = memory_estimate(parse_args([*flags, "--max-running-requests", "3", "--disable-radix-cache"], environ={}))
    assert "state_checkpoints" not in without
    assert without["kv_tokens_that_fit"] >= estimate["kv_tokens_that_fit"]
    monkeypatch.setattr(devices, "usable_memory", lambda: 2**22)
    many = parse_args([*flags, "--max-running-requests", "3000"], environ={})
    with pytest.raises(ValueError, match="--max-running-requests 3000: the states of the recurrent layers"):
        resolve(many, target, None)
