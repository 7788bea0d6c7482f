"""The MTP layer of a DeepSeek checkpoint computes its formula, in any supported place, or is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

from eagle_server.attention.dense import DenseCausal
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.interface import DraftHead, DraftModel
from eagle_server.models.drafts.mtp import MtpHead
from eagle_server.models.targets.decoder import TargetModel
from tests.support import deepseek
from tests.support.deepseek import DEEPSEEK, GLM, LAYERS
from tests.unit.models import draft_checkpoints as dc

CONTEXT, ROWS, VOCAB = 64, 12, DEEPSEEK["vocab_size"]
PREFIX = f"model.layers.{LAYERS}."
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A target with its MTP layer. The norm weights are not 1."""
    target, head = deepseek.random_pair(3)
    with torch.no_grad():
        for parameter in [*target.parameters(), *head.parameters()]:
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.3)
    return deepseek.save(target, head, tmp_path / "target")


def served(directory: Path) -> TargetModel:
    return load_target(directory, Loading(context=CONTEXT, progress=False), dtype="float32")


def load(path: Path, target: TargetModel, **options: Any) -> DraftModel:
    return load_draft(path, target, Loading(context=CONTEXT, progress=False), **options)


def own(directory: Path, target: TargetModel, **options: Any) -> DraftModel:
    return load(directory, target, target_path=directory, **options)


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB, (ROWS,), generator=generator), torch.randn(ROWS, 48, generator=generator)


@torch.inference_mode()
def passes(head: DraftHead) -> list[Tensor]:
    """Logits of a first pass, and of a second pass on the feedback of the first."""
    tokens, features = inputs()
    positions, attention = torch.arange(ROWS), DenseCausal(1)
    first = head(tokens, head.combine(features), positions, attention)
    second = head(tokens.flip(0), first.feedback, positions, attention)
    return [head.logits(first.normed), head.logits(second.normed)]


@torch.inference_mode()
def expected(directory: Path) -> list[Tensor]:
    """The same by the formula, with transformers' decoder layer."""
    w = load_file(directory / "model.safetensors")
    settings = {key: value for key, value in DEEPSEEK.items() if key not in ("architectures", "model_type")}
    config = DeepseekV3Config(**{**settings, "num_mtp_layers": 1}, attn_implementation="eager")
    config._experts_implementation = "eager"
    layer = DeepseekV3DecoderLayer(config, LAYERS).eval()
    parts = {name.removeprefix(PREFIX): tensor for name, tensor in w.items() if name.startswith(PREFIX)}
    experts = range(DEEPSEEK["n_routed_experts"])
    fused = {
        "mlp.experts.gate_up_proj": torch.stack(
            [torch.cat([parts[f"mlp.experts.{i}.{n}_proj.weight"] for n in ("gate", "up")]) for i in experts]
        ),
        "mlp.experts.down_proj": torch.stack([parts[f"mlp.experts.{i}.down_proj.weight"] for i in experts]),
    }
    layer.load_state_dict({**{k: v for k, v in parts.items() if k in layer.state_dict()}, **fused})
    positions = torch.arange(ROWS)[None]
    mask = torch.full((ROWS, ROWS), float("-inf")).triu(1)[None, None]

    def step(tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = w["model.embed_tokens.weight"][tokens]
        pair = torch.cat([dc.rms(embedded, parts["enorm.weight"]), dc.rms(hidden, parts["hnorm.weight"])], -1)
        x = (pair @ parts["eh_proj.weight"].T)[None]
        rope = DeepseekV3RotaryEmbedding(config)(x, positions)
        return dc.rms(layer(x, attention_mask=mask, position_embeddings=rope)[0], parts["shared_head.norm.weight"])

    tokens, features = inputs()
    first = step(tokens, features)
    second = step(tokens.flip(0), first)
    return [z @ w["lm_head.weight"].T for z in (first, second)]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [None, "NEXTN"])
def test_mtp_layer_of_the_targets_own_files_computes_its_formula(directory: Path, algorithm: Any) -> None:
    """Copies of the target's embedding and lm_head are not stored twice."""
    target = served(directory)
    loaded = own(directory, target, algorithm=algorithm)
    assert loaded.algorithm == "NEXTN"
    assert loaded.aux_boundaries == ()
    assert isinstance(loaded, MtpHead)
    assert loaded.embed is None
    assert loaded.lm_head is None
    close(passes(loaded), expected(directory))


@pytest.mark.parametrize("index", [0, LAYERS])
@pytest.mark.parametrize("copies", [True, False])
def test_exported_mtp_layer_computes_the_same(tmp_path: Path, directory: Path, index: int, copies: bool) -> None:
    """In a separate directory, with the original layer number or with 0."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {
        f"model.layers.{index}.{name.removeprefix(PREFIX)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(PREFIX) and (copies or not name.endswith(("embed_tokens.weight", "head.weight")))
    }
    config = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    loaded = load(dc.write(tmp_path / "draft", tensors, config), served(directory), algorithm="NEXTN")
    assert loaded.algorithm == "NEXTN"
    close(passes(loaded), expected(directory))


def test_saved_mtp_layer_loads_again_with_equal_logits(tmp_path: Path, directory: Path) -> None:
    target = served(directory)
    head = own(directory, target)
    assert isinstance(head, MtpHead)
    save_checkpoint(head, tmp_path / "draft", DEEPSEEK, torch.float32)
    close(passes(load(tmp_path / "draft", target)), passes(head))


def test_saved_target_loads_again_with_equal_logits(tmp_path: Path, directory: Path) -> None:
    target = served(directory)
    save_checkpoint(target, tmp_path / "again", DEEPSEEK, torch.float32)
    rows = torch.arange(9)
    logits = [m.logits(m(rows, rows, DenseCausal(1)).hidden) for m in (target, served(tmp_path / "again"))]
    torch.testing.assert_close(*logits, atol=0, rtol=0)


@pytest.mark.deep
def test_own_embedding_and_head_are_kept_where_they_differ(directory: Path) -> None:
    head_weight = torch.randn(VOCAB, 48)
    edit(directory, lambda t: t.update({f"{PREFIX}shared_head.head.weight": head_weight}))
    head = own(directory, served(directory))
    assert isinstance(head, MtpHead)
    assert head.lm_head is not None
    wanted = expected(directory)
    weight = load_file(directory / "model.safetensors")["lm_head.weight"]
    z = [torch.linalg.lstsq(weight, logits.T).solution.T for logits in wanted]
    close(passes(head), [each @ head_weight.T for each in z])


def test_token_map_selects_rows_of_the_shared_head(tmp_path: Path, directory: Path) -> None:
    ids = [7, 3, 40, 11]
    torch.save(ids, tmp_path / "freq.pt")
    head = own(directory, served(directory), token_map=tmp_path / "freq.pt")
    close(passes(head), [logits[:, ids] for logits in expected(directory)])
    assert head.target_ids(torch.tensor([[2, 0]])).tolist() == [[40, 7]]
    assert head.draft_vocab_size == 4


ERRORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no layer": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith(PREFIX)],
        rf"this is the target itself, .*no {PREFIX}eh_proj.weight",
    ),
    "missing": (lambda t: t.pop(f"{PREFIX}enorm.weight"), r"missing tensors: layers.2.enorm.weight"),
    "missing expert": (
        lambda t: t.pop(f"{PREFIX}mlp.experts.5.up_proj.weight"),
        "missing tensors: layers.2.mlp.experts.5.up_proj.weight",
    ),
    "unexpected": (lambda t: t.update({f"{PREFIX}extra": torch.ones(1)}), f"unexpected tensors: {PREFIX}extra"),
    "shape": (
        lambda t: t.update({f"{PREFIX}eh_proj.weight": torch.ones(48, 48)}),
        r"eh_proj.weight: expected shape \[48, 96\]",
    ),
    "vocabulary": (lambda t: t.update({f"{PREFIX}embed_tokens.weight": torch.ones(65, 48)}), "embed_tokens.*64.*65"),
    "second of two layers": (
        lambda t: t.update({f"model.layers.{LAYERS + 1}.eh_proj.weight": torch.ones(48, 96)}),
        "missing tensors: layers.3.enorm.weight",
    ),
    "second of three layers": (
        lambda t: t.update({f"model.layers.{LAYERS + 2}.eh_proj.weight": torch.ones(48, 96)}),
        "3 MTP layers are expected, but there is no model.layers.3.eh_proj.weight",
    ),
    "embedding of a later layer": (
        lambda t: t.update(
            {
                name.replace(PREFIX, f"model.layers.{LAYERS + 1}."): 2 * each
                for name, each in t.items()
                if PREFIX in name
            }
        ),
        r"layers.3.embed_tokens.weight: not the target's; MTP layers after the first must share it",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_mtp_layer_is_refused(directory: Path, name: str) -> None:
    change, message = ERRORS[name]
    target = served(directory)
    edit(directory, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        own(directory, target, algorithm="NEXTN")
    assert str(directory) in str(caught.value)


def test_layers_that_config_json_counts_and_nobody_stored_are_named(directory: Path) -> None:
    target = served(directory)
    deepseek.write_config(directory, num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match=r"2 MTP layers are expected, but there is no model.layers.3.eh_proj"):
        own(directory, target)


@pytest.mark.parametrize("base", [DEEPSEEK, GLM], ids=["deepseek", "glm"])
@pytest.mark.parametrize("form", ["own", "exported", "whole"])
def test_mtp_layers_draft_from_the_targets_files_alone_or_within_a_whole_model(
    tmp_path: Path, base: dict[str, Any], form: str
) -> None:
    """`whole`: a copy of the target in another directory, as the files of a quantized target have beside them."""
    directory = deepseek.save(*deepseek.random_pair(3, base), tmp_path / "target", base)
    target, draft = served(directory), tmp_path / "draft"
    expected = passes(own(directory, target))  # type: ignore[arg-type]
    shutil.copytree(directory, draft)
    if form == "exported":
        edit(draft, lambda t: [t.pop(name) for name in list(t) if not name.startswith(PREFIX)])
    found = own(directory, target) if form == "own" else load(draft, target, algorithm="NEXTN")
    assert isinstance(found, MtpHead)
    close(passes(found), expected)


def test_another_targets_config_is_refused(tmp_path: Path, directory: Path) -> None:
    target = served(directory)
    save_checkpoint(own(directory, target), tmp_path / "draft", {**DEEPSEEK, "vocab_size": 99}, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="vocab_size: an MTP layer has its target's, expected 64, found 99"):
        load(tmp_path / "draft", target)


def test_mtp_layer_under_another_algorithm_is_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"EAGLE was asked for, but the files hold an MTP layer \(NEXTN\)"):
        own(directory, served(directory), algorithm="EAGLE")


@pytest.mark.parametrize("declared", [None, 0, 1, 2])
def test_mtp_layers_that_nobody_asked_for_are_left_alone(directory: Path, declared: int | None) -> None:
    """Their tensors tell which layers they are; config.json may count them, or not, or wrongly."""
    expected = served(directory)
    deepseek.write_config(directory, num_nextn_predict_layers=declared)
    found = served(directory)
    assert len(found.layers) == expected.config.num_layers  # type: ignore[union-attr]
    assert set(dict(found.weight_views())) == set(dict(expected.weight_views()))  # type: ignore[union-attr]


def test_a_layer_too_many_that_is_no_mtp_layer_is_refused(directory: Path) -> None:
    layers = served(directory).config.num_layers
    deepseek.write_config(directory, num_hidden_layers=layers - 1)
    with pytest.raises(CheckpointError, match=rf"unexpected tensors: model.layers.{layers - 1}\."):
        served(directory)
