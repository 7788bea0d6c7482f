"""Rounded weights are kept and mapped: the same numbers, no second rounding, no stale or damaged file."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save

from eagle_server.config.sections import Config
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.linear import packed as linear
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.library import available
from tests.unit.models.test_load_target import checkpoint, logits

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def load(directory: Path, kept: Path | None, quantization: Quantization = "int4") -> TargetModel:
    model = load_target(directory, Loading(progress=False, quantization=quantization), quantization_cache=kept)
    assert isinstance(model, TargetModel)
    return model


def refuse_rounding(*_: Any) -> None:
    raise AssertionError("weights are rounded again")


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, EXPERTS], ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_later_loads_map_the_same_weights(
    quantization: Quantization, settings: dict[str, Any], tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path / "target", **settings)
    expected = load(directory, None, quantization)
    assert logits(load(directory, kept, quantization)).equal(logits(expected))
    monkeypatch.setattr(linear, "quantize", refuse_rounding)
    mapped = load(directory, kept, quantization)
    assert logits(mapped).equal(logits(expected))
    views = dict(mapped.weight_views())
    assert all(view.equal(views[name]) for name, view in expected.weight_views())
    assert [file.suffix for file in kept.iterdir()] == [".safetensors"]


def test_other_weights_have_another_file(tmp_path: Path, kept: Path) -> None:
    directory = checkpoint(tmp_path / "target")
    load(directory, kept)
    load(checkpoint(directory, num_hidden_layers=3), kept)
    load(directory, kept, "int8")
    assert len(list(kept.iterdir())) == 3


@pytest.mark.parametrize("damage", ["truncated", "empty", "other content", "other shapes"])
def test_a_damaged_file_is_named_and_made_again(
    damage: str, tmp_path: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint(tmp_path / "target")
    expected = logits(load(directory, kept))
    file = next(kept.iterdir())
    whole = file.read_bytes()
    damaged = {"truncated": whole[:-64], "empty": b"", "other content": b"\x00" * 100}
    if damage == "other shapes":
        tensors = {name: tensor[:1].clone() for name, tensor in load_file(file).items()}
        with safe_open(file, framework="pt") as handle:
            damaged[damage] = save(tensors, metadata=handle.metadata())
    file.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert logits(load(directory, kept)).equal(expected)
    assert f"--quantization-cache: {file} cannot be used and is made again" in caplog.text
    assert file.read_bytes() == whole


def test_a_directory_that_cannot_be_used_is_named_before_anything_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(linear, "quantize", refuse_rounding)
    with pytest.raises(CheckpointError, match=r"^--quantization-cache: .*file cannot be used"):
        load(checkpoint(tmp_path / "target"), tmp_path / "file")


def test_a_full_disk_does_not_end_a_start(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint(tmp_path / "target")
    expected = logits(load(directory, None))

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eagle_server.ops.whole_file._sync", full)
    assert logits(load(directory, kept)).equal(expected)
    assert "cannot be written ([Errno 28] No space left on device)" in caplog.text
    assert not list(kept.iterdir()), "and nothing stays behind"


def test_a_directory_that_cannot_be_written_serves_what_it_has(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint(tmp_path / "target")
    expected = logits(load(directory, kept))
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(linear, "quantize", refuse_rounding)
    with caplog.at_level(logging.INFO):
        assert logits(load(directory, kept)).equal(expected)
    assert "are mapped from" in caplog.text


def test_what_killed_starts_left_is_removed(tmp_path: Path, kept: Path) -> None:
    for name, age in (("old", 7200), ("new", 60)):
        (kept / f".unfinished-{name}").mkdir(parents=True)
        for path in (kept / f".unfinished-{name}" / "file", kept / f".unfinished-{name}"):
            path.touch()
            os.utime(path, (time.time() - age,) * 2)
    load(checkpoint(tmp_path / "target"), kept)
    assert [path.name for path in kept.glob(".unfinished-*")] == [".unfinished-new"]


def test_starts_at_once_all_serve_and_leave_one_whole_file(tmp_path: Path, kept: Path) -> None:
    """Every writer has a file of its own, and none is seen before it is complete."""
    directory = checkpoint(tmp_path / "target")
    expected = logits(load(directory, kept)).tolist()
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    file.unlink()
    go = threading.Barrier(5)
    found: list[Any] = []

    def start() -> None:
        go.wait()
        found.append(logits(load(directory, kept)).tolist())

    def watch() -> None:
        go.wait()
        while len(found) < 4:
            if file.is_file() and file.read_bytes() != whole:
                found.append("half of a file")

    threads = [threading.Thread(target=each) for each in (start, start, start, start, watch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
    assert [each.name for each in kept.iterdir()] == [file.name]


def test_the_option_needs_a_format(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="--quantization-cache needs --quantization int8 or int4"):
        Config.model_validate({"model": {"quantization_cache": tmp_path}})
