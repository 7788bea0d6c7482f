"""Medusa heads of every published format compute their formula. Other files are refused with a reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.medusa import export_medusa, medusa_loss, new_heads
from eagle_tools.training.ttt import teach
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models.draft_checkpoints import CONFIG, CONTEXT, LAYERS, H, Tensors, V

ROWS = 5
TARGET_CONFIG = {**CONFIG, "num_hidden_layers": LAYERS, "architectures": ["LlamaForCausalLM"]}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    torch.set_num_threads(1)
    return dc.target()


def medusa_tensors(heads: int = 3, layers: int = 1, *, shared: bool = False, prefix: str = "") -> Tensors:
    generator = torch.Generator().manual_seed(7)
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{prefix}{i}.{j}.linear.weight"] = torch.randn(H, H, generator=generator) * 0.2
            tensors[f"{prefix}{i}.{j}.linear.bias"] = torch.randn(H, generator=generator)
        if not shared:
            tensors[f"{prefix}{i}.{layers}.weight"] = torch.randn(V, H, generator=generator) * 0.3
    return tensors


def reference(w: Tensors, h: Tensor, head: int, layers: int, lm_head: Tensor, prefix: str = "") -> Tensor:
    x = h
    for j in range(layers):
        z = x @ w[f"{prefix}{head}.{j}.linear.weight"].T + w[f"{prefix}{head}.{j}.linear.bias"]
        x = x + z * torch.sigmoid(z)
    return x @ w.get(f"{prefix}{head}.{layers}.weight", lm_head).T


def features() -> Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(3))


def load(path: Path, target: TargetModel, **options: Any) -> MedusaHeads:
    loaded = load_draft(path, target, Loading(context=CONTEXT, progress=False), **options)
    assert loaded.algorithm == "MEDUSA"
    assert isinstance(loaded, MedusaHeads)
    return loaded


@torch.inference_mode()
def check(heads: MedusaHeads, w: Tensors, target: TargetModel, count: int, layers: int, prefix: str = "") -> None:
    assert (heads.config.heads, heads.config.layers) == (count, layers)
    lm_head = target.lm_head.dense_weight()
    expected = torch.stack([reference(w, features(), i, layers, lm_head, prefix) for i in range(count)])
    torch.testing.assert_close(heads(features()), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(heads(features(), 1), expected[:1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "no config"])
def test_medusa_1(tmp_path: Path, target: TargetModel, heads: int, layers: int, file: str) -> None:
    tensors = medusa_tensors(heads, layers)
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "somebody/vicuna"}
    if file.endswith(".pt"):
        dc.write(tmp_path, tensors, config, file)
    else:
        dc.write(tmp_path, tensors, config)
        (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.safetensors")
    if file == "no config":
        (tmp_path / "config.json").unlink()
    check(load(tmp_path, target, algorithm="MEDUSA"), tensors, target, heads, layers)


def test_the_shared_head_is_the_targets(tmp_path: Path, target: TargetModel) -> None:
    tensors = medusa_tensors(shared=True)
    heads = load(dc.write(tmp_path, tensors, {}), target)
    assert not heads.config.own_lm_heads
    check(heads, tensors, target, 3, 1)


def test_medusa_2_is_target_and_draft_in_one_directory(tmp_path: Path, target: TargetModel) -> None:
    save_checkpoint(target, tmp_path, {**TARGET_CONFIG, "medusa_num_heads": 3}, torch.float32)
    own = medusa_tensors(prefix="medusa_head.")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), **own}, file)
    served = load_target(tmp_path, Loading(progress=False))
    assert torch.equal(served.lm_head.dense_weight(), target.lm_head.dense_weight())
    for path in (tmp_path, None):
        check(load(tmp_path, served, target_path=path), own, served, 3, 1, "medusa_head.")


def test_heads_and_blocks_are_counted_in_the_file(
    tmp_path: Path, target: TargetModel, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # as in published configs
    with caplog.at_level(logging.WARNING):
        heads = load(dc.write(tmp_path, medusa_tensors(5), config), target)
    assert heads.config.heads == 5
    assert "medusa_num_heads 2: the file has 5" in caplog.text


def _without(name: str) -> Tensors:
    return {key: tensor for key, tensor in medusa_tensors().items() if key != name}


W = torch.ones(H, H)
ERRORS: dict[str, tuple[Tensors, str]] = {
    "missing bias": (_without("1.0.linear.bias"), "missing tensors: 1.0.linear.bias"),
    "missing lm_head": (_without("1.1.weight"), "missing tensors: 1.1.weight"),
    "missing head": ({k: t for k, t in medusa_tensors().items() if k[0] != "1"}, r"heads are numbered \[0, 2\]"),
    "missing block": ({k: t for k, t in medusa_tensors(1, 3).items() if k[2] != "1"}, r"blocks are numbered \[0, 2\]"),
    "unexpected": (medusa_tensors() | {"medusa_num.weight": W}, "unexpected tensors: medusa_num.weight"),
    "another width": (medusa_tensors() | {"0.0.linear.weight": torch.ones(16, 16)}, r"0.0.linear.weight: .*\[32, 32\]"),
    "another vocabulary": (medusa_tensors() | {"2.1.weight": torch.ones(50, H)}, r"2.1.weight: expected .*\[48, 32\]"),
    "early vllm": ({"blocks.0.layers.0.weight": W, "lm_heads.0.weight": W}, "vLLM's early Medusa format"),
    "no heads": ({"medusa_head.norm.weight": W}, "no Medusa heads here"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_files_that_are_no_medusa_heads_are_refused(tmp_path: Path, target: TargetModel, name: str) -> None:
    tensors, message = ERRORS[name]
    dc.write(tmp_path, {key: tensor.clone() for key, tensor in tensors.items()}, {"medusa_num_heads": 3})
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, target)
    assert str(tmp_path) in str(caught.value)


def test_an_algorithm_that_contradicts_the_files_is_refused(tmp_path: Path, target: TargetModel) -> None:
    dc.write(tmp_path / "medusa", medusa_tensors(), {})
    with pytest.raises(CheckpointError, match="EAGLE was asked for, but the files hold Medusa heads"):
        load(tmp_path / "medusa", target, algorithm="EAGLE")
    dc.write(tmp_path / "eagle", dc.eagle_tensors(bias=True), CONFIG)
    with pytest.raises(CheckpointError, match="MEDUSA was asked for, but the files hold an EAGLE head"):
        load(tmp_path / "eagle", target, algorithm="MEDUSA")
    (tmp_path / "eagle" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path / "eagle", target)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_new_heads_predict_like_the_target_and_trained_heads_load_again(
    tmp_path: Path, target: TargetModel, layers: int
) -> None:
    model = new_heads(target, 2, layers)
    for logits in model(features()):
        torch.testing.assert_close(logits, target.logits(features()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    export_medusa(model, tmp_path, torch.float32)
    loaded = load(tmp_path, target)
    torch.testing.assert_close(loaded(features()), model(features()))


def test_the_loss_is_the_weighted_cross_entropy_of_later_tokens(target: TargetModel) -> None:
    model, length = new_heads(target, 2, 1), 9
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    window = torch.randint(V, (2, length), generator=torch.Generator().manual_seed(2))
    lesson = teach(target, window, torch.arange(V))
    loss, hits = medusa_loss(model, lesson)
    logits, expected = model(lesson.features).detach().unflatten(1, (2, length - 2)), 0.0
    probs = lesson.probs.unflatten(0, (2, -1))
    for i in range(2):
        entropies = [
            -float((probs[b, t + i] * logits[i, b, t].log_softmax(-1)).sum())
            for b in range(2)
            for t in range(length - 2 - i)
        ]
        expected += 0.8**i * sum(entropies) / len(entropies)
        for b in range(2):
            for t in range(length - 2 - i):
                assert hits[i, b, t + i] == (logits[i, b, t].argmax() == window[b, t + 2 + i])
    assert float(loss.detach()) == pytest.approx(expected / 1.8, rel=1e-4)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
