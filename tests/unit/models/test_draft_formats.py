"""For every supported draft format, a tiny checkpoint computes the formula."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.eagle3 import Eagle3Head
from eagle_server.models.drafts.interface import DraftHead, DraftModel
from eagle_server.models.targets.decoder import TargetModel
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models.draft_checkpoints import CONFIG, CONTEXT, VD, D, H, Semantics, Tensors, V

ROWS = 12
PLAIN = dc.Semantics()
EAGLE3 = {**CONFIG, "draft_vocab_size": VD}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    torch.set_num_threads(1)
    return dc.target()


def load(path: Path, target: TargetModel, **options: Any) -> DraftModel:
    return load_draft(path, target, Loading(context=CONTEXT, progress=False), **options)


def inputs(head: DraftHead) -> tuple[Tensor, Tensor, Tensor, DenseCausal]:
    """Tokens, features, positions and attention for ROWS rows of one sequence."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(V, (ROWS,), generator=generator)
    features = torch.randn(ROWS, max(1, len(head.aux_boundaries)) * H, generator=generator)
    window = head.config.windows[0]
    distance = torch.arange(ROWS)[:, None] - torch.arange(ROWS)
    seen = (distance >= 0) & (distance < (window or ROWS))
    bias = torch.zeros(ROWS, ROWS).masked_fill(~seen, float("-inf"))
    return tokens, features, torch.arange(ROWS), DenseCausal(1, bias)


@torch.inference_mode()
def passes(head: DraftHead) -> list[Tensor]:
    """Logits of a first pass, and of a second pass on the feedback of the first."""
    tokens, features, positions, attention = inputs(head)
    first = head(tokens, head.combine(features), positions, attention)
    second = head(tokens.flip(0), first.feedback, positions, attention)
    return [head.logits(first.normed), head.logits(second.normed)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


def expected_eagle(w: Tensors, target: TargetModel, head: DraftHead, how: Semantics = PLAIN) -> list[Tensor]:
    tokens, features, *_ = inputs(head)
    first, y1 = dc.reference_eagle(w, target.embed, tokens, features, how)
    _, y2 = dc.reference_eagle(w, target.embed, tokens.flip(0), first, how)
    return [y @ target.lm_head.weight.T for y in (y1, y2)]


def expected_eagle3(w: Tensors, target: TargetModel, head: DraftHead, how: Semantics = PLAIN) -> list[Tensor]:
    tokens, features, *_ = inputs(head)
    embed = w.get("embed_tokens.weight", target.embed)
    first, y1 = dc.reference_eagle3(w, embed, tokens, dc.reference_combine(w, features), how)
    _, y2 = dc.reference_eagle3(w, embed, tokens.flip(0), first, how)
    return [y @ w.get("lm_head.weight", target.lm_head.weight).T for y in (y1, y2)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["plain", "with-embedding", "bin", "nested", "prefixed"])
def test_eagle_computes_its_formula(tmp_path: Path, target: TargetModel, bias: bool, form: str) -> None:
    tensors, config = dc.eagle_tensors(bias=bias), {**CONFIG, "bias": bias}
    written: Tensors = dict(tensors)
    if form == "with-embedding":
        written["embed_tokens.weight"] = target.embed.detach().half()
        written["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(D // 2)
    if form == "nested":
        config = {"model_type": "eagle", "bias": bias, "model": CONFIG, "truncated_vocab_size": V}
    if form == "prefixed":
        written = {f"model.{name}": tensor for name, tensor in tensors.items()}
    loaded = load(dc.write(tmp_path, written, config, "pytorch_model.bin" if form == "bin" else None), target)
    assert loaded.algorithm == "EAGLE"
    assert loaded.aux_boundaries == ()
    close(passes(loaded), expected_eagle(tensors, target, loaded))


def test_eagle_token_map_selects_rows_of_the_targets_head(tmp_path: Path, target: TargetModel) -> None:
    ids = [7, 3, 40, 11]
    directory = dc.write(tmp_path / "draft", tensors := dc.eagle_tensors(bias=True), CONFIG)
    torch.save(ids, tmp_path / "freq.pt")
    head = load(directory, target, token_map=tmp_path / "freq.pt")
    close(passes(head), [logits[:, ids] for logits in expected_eagle(tensors, target, head)])
    assert head.target_ids(torch.tensor([[2, 0]])).tolist() == [[40, 7]]


def test_eagle_keeps_its_own_embedding_and_head_where_they_differ(tmp_path: Path, target: TargetModel) -> None:
    tensors = dc.eagle_tensors(bias=True)
    own = {"embed_tokens.weight": torch.randn(V, H), "lm_head.weight": torch.randn(V, H)}
    head = load(dc.write(tmp_path, tensors | own, CONFIG), target)
    tokens, features, *_ = inputs(head)
    _, y = dc.reference_eagle(tensors, own["embed_tokens.weight"], tokens, features)
    close(passes(head)[:1], [y @ own["lm_head.weight"].T])


@dataclass(frozen=True)
class Variant:
    """The config keys and tensors that a variant adds to plain EAGLE-3, the tensors it drops, and their meaning."""

    config: dict[str, Any] = field(default_factory=dict)
    adds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    how: Semantics = Semantics()
    streams: int = 3


_ATTENTION = "midlayer.self_attn."
_FC_NORMS = {f"fc_norm.{i}.weight": (H,) for i in range(3)}
_BIASES = {
    f"{_ATTENTION}q_proj.bias": (4 * D,),
    f"{_ATTENTION}k_proj.bias": (2 * D,),
    f"{_ATTENTION}v_proj.bias": (16,),
}
_MAP = ("d2t", "t2d")
VARIANTS = {
    "plain": Variant(),
    "norm-before-residual": Variant({"norm_before_residual": True}, how=Semantics(norm_before_residual=True)),
    "fc-norm": Variant({"fc_norm": True}, _FC_NORMS),
    "eagle-3.1": Variant({"fc_norm": True, "norm_output": True}, _FC_NORMS, how=Semantics(norm_output=True)),
    "norm-before-fc": Variant({"norm_before_fc": True}, {"input_norm.weight": (3 * H,)}),
    "specforge-norm-output": Variant({"norm_output": True}),
    "attention-bias": Variant({"attention_bias": True}, _BIASES),
    "o-bias": Variant({"attention_bias": True}, {**_BIASES, f"{_ATTENTION}o_proj.bias": (H,)}),
    "qk-norm": Variant({"model_type": "qwen3"}, {f"{_ATTENTION}{n}_norm.weight": (D,) for n in "qk"}),
    "no-aux": Variant({"eagle_config": {"use_aux_hidden_state": False}}, drops=("fc.weight",), streams=0),
    "two-streams": Variant({"eagle_aux_hidden_state_layer_ids": [3, 6]}, streams=2),
    "whole-vocabulary": Variant({"draft_vocab_size": None}, {"lm_head.weight": (V, H)}, _MAP),
    "shared-head": Variant({"draft_vocab_size": V}, drops=("lm_head.weight", *_MAP)),
    "own-embedding": Variant({}, {"embed_tokens.weight": (V, H)}),
    "window": Variant({"sliding_window": 4, "layer_types": ["sliding_attention"]}, how=Semantics(window=4)),
    "rope-theta": Variant({"rope_theta": 500.0}, how=Semantics(theta=500.0)),
    "rope-parameters": Variant(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, how=Semantics(theta=700.0)
    ),
}


def tensors_of(variant: Variant) -> Tensors:
    tensors = dc.eagle3_tensors(streams=variant.streams)
    for name, shape in variant.adds.items():
        tensors[name] = dc.norm_weight(shape[0]) if len(shape) == 1 else torch.randn(shape) * 0.4
    return {name: tensor for name, tensor in tensors.items() if name not in variant.drops}


def as_speculators(variant: Variant) -> dict[str, Any]:
    """The same config, nested as the speculators library writes it."""
    outer = {k: v for k, v in variant.config.items() if "norm" in k or k.startswith(("eagle", "draft"))}
    inner = {k: v for k, v in variant.config.items() if k not in outer}
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": False,
        "draft_vocab_size": VD,
        **outer,
        "transformer_layer_config": {**CONFIG, **inner},
        "speculators_config": {"algorithm": "eagle3"},
    }


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("form", ["midlayer", "layers.0", "speculators"])
def test_eagle3_variant_computes_its_formula(tmp_path: Path, target: TargetModel, name: str, form: str) -> None:
    variant = VARIANTS[name]
    how = variant.how
    if form == "speculators" and variant.config.get("norm_output"):
        how = Semantics(norm_output=True)  # no ambiguity there
    tensors = tensors_of(variant)
    config = as_speculators(variant) if form == "speculators" else {**EAGLE3, **variant.config}
    prefix = "midlayer." if form == "midlayer" else "layers.0."
    written = {key.replace("midlayer.", prefix): tensor for key, tensor in tensors.items()}
    loaded = load(dc.write(tmp_path, written, config), target)
    assert loaded.algorithm == "EAGLE3"
    close(passes(loaded), expected_eagle3(tensors, target, loaded, how))


def test_a_speculators_head_without_the_flag_norms_before_the_residual(tmp_path: Path, target: TargetModel) -> None:
    """As vLLM reads it, for which older exports were made."""
    config = as_speculators(VARIANTS["plain"])
    del config["norm_before_residual"]
    tensors = tensors_of(VARIANTS["plain"])
    written = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    head = load(dc.write(tmp_path, written, config), target)
    close(passes(head), expected_eagle3(tensors, target, head, Semantics(norm_before_residual=True)))


def test_deepspecs_heads_are_eagle3_over_the_outputs_of_their_layers(tmp_path: Path, target: TargetModel) -> None:
    """Five streams, norms of queries and keys, the whole vocabulary, copies of the target's embedding and lm_head."""
    shape = {f"{_ATTENTION}{n}_norm.weight": (D,) for n in "qk"}
    tensors = tensors_of(Variant(adds=shape, drops=("lm_head.weight", *_MAP), streams=5))
    copies = {"embed_tokens.weight": target.embed.detach(), "lm_head.weight": target.lm_head.weight.detach()}
    written = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in (tensors | copies).items()}
    config = {
        **{key: value for key, value in CONFIG.items() if key != "draft_vocab_size"},
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_target_layers": target.config.num_layers,
        "target_layer_ids": (ids := [0, 1, 2, 4, 5]),
        "ttt_length": 7,
    }
    head = load(dc.write(tmp_path, written, config), target)
    assert head.algorithm == "EAGLE3"
    assert head.aux_boundaries == tuple(layer + 1 for layer in ids)
    close(passes(head), expected_eagle3(tensors, target, head))
    config["target_layer_ids"] = [0, 1, 2, 4, target.config.num_layers - 1]
    with pytest.raises(CheckpointError, match="the output of the last layer, .* is after the final norm"):
        load(dc.write(tmp_path, written, config), target)


@pytest.mark.parametrize("norm", ["input_layernorm", "hidden_norm"])
def test_second_layers_norm_has_two_names(tmp_path: Path, target: TargetModel, norm: str) -> None:
    tensors = dc.eagle3_tensors() | dc.layer_tensors("layers.1.", norms=(norm,))
    written = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    head = load(dc.write(tmp_path, written, {**EAGLE3, "num_hidden_layers": 2}), target)
    close(passes(head), expected_eagle3(tensors, target, head, Semantics(deep_norm=norm)))


def test_legacy_aux_norms_are_fc_norms(tmp_path: Path, target: TargetModel) -> None:
    tensors = tensors_of(VARIANTS["fc-norm"])
    names = dict(zip(_FC_NORMS, ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"), strict=True))
    written = {names.get(key, key): tensor for key, tensor in tensors.items()}
    head = load(dc.write(tmp_path, written, {**EAGLE3, "use_aux_norm": True}), target)
    close(passes(head), expected_eagle3(tensors, target, head))


def test_narrower_draft_brings_its_own_embedding(tmp_path: Path, target: TargetModel) -> None:
    tensors = dc.eagle3_tensors(hidden=16) | {"embed_tokens.weight": torch.randn(V, 16)}
    config = {**EAGLE3, "hidden_size": 16, "target_hidden_size": H}
    head = load(dc.write(tmp_path, tensors, config), target)
    close(passes(head), expected_eagle3(tensors, target, head))


def test_copies_of_the_target_are_shared(tmp_path: Path, target: TargetModel) -> None:
    tensors = tensors_of(VARIANTS["shared-head"])
    copies = {"embed_tokens.weight": target.embed.detach(), "lm_head.weight": target.lm_head.weight.detach()}
    head = load(dc.write(tmp_path, tensors | copies, {**EAGLE3, "draft_vocab_size": V}), target)
    assert isinstance(head, Eagle3Head)
    assert head.embed is None
    assert head.lm_head is None
    assert not any(p.shape == (V, H) for p in head.parameters())


def test_specforge_norm_output_warns_and_an_override_decides(
    tmp_path: Path, target: TargetModel, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = dc.eagle3_tensors()
    directory = dc.write(tmp_path, tensors, {**EAGLE3, "norm_output": True})
    with caplog.at_level(logging.WARNING):
        load(directory, target)
    assert "override norm_output" in caplog.text
    head = load(directory, target, overrides={"norm_output": True})
    close(passes(head), expected_eagle3(tensors, target, head, Semantics(norm_output=True)))


def test_rope_theta_override_reaches_either_place(tmp_path: Path, target: TargetModel) -> None:
    tensors, rope = dc.eagle3_tensors(), {"rope_type": "default", "rope_theta": 5.0}
    for number, extra in enumerate(({}, {"rope_parameters": rope}, {"rope_scaling": rope})):
        directory = dc.write(tmp_path / str(number), tensors, {**EAGLE3, **extra})
        head = load(directory, target, overrides={"rope_theta": 300.0})
        close(passes(head), expected_eagle3(tensors, target, head, Semantics(theta=300.0)))


def test_draft_ids_map_by_offset(tmp_path: Path, target: TargetModel) -> None:
    tensors = dc.eagle3_tensors()
    head = load(dc.write(tmp_path, tensors, EAGLE3), target)
    assert head.target_ids(torch.arange(VD)).tolist() == tensors["t2d"].nonzero().flatten().tolist()


def test_exported_head_loads_again_with_equal_logits(tmp_path: Path, target: TargetModel) -> None:
    variant = VARIANTS["eagle-3.1"]
    config = {**EAGLE3, **variant.config}
    head = load(dc.write(tmp_path / "a", tensors_of(variant), config), target)
    assert isinstance(head, Eagle3Head)
    save_checkpoint(head, tmp_path / "b", config, torch.float32)
    close(passes(load(tmp_path / "b", target)), passes(head))


def test_head_follows_the_targets_dtype(tmp_path: Path) -> None:
    target = dc.target().to(torch.bfloat16)
    tensors = {k: t.half() if t.is_floating_point() else t for k, t in dc.eagle3_tensors().items()}
    head = load(dc.write(tmp_path, tensors, EAGLE3), target)
    assert isinstance(head, Eagle3Head)
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    tokens, features, positions, _ = inputs(head)
    out = head(tokens, head.combine(features.bfloat16()), positions, DenseCausal(1))
    assert out.feedback.dtype == torch.bfloat16
    assert head.logits(out.normed).dtype == torch.bfloat16
