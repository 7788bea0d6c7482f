"""EAGLE-3 heads as NVIDIA Model Optimizer exports them, and heads whose config.json disagrees with their tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.eagle3 import Eagle3Head
from eagle_server.models.targets.decoder import TargetModel
from tests.support.engines import plain, pools, request, run, speculative, tokens_of
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models.draft_checkpoints import CONFIG, CONTEXT, LAYERS, VD, D, H, Semantics, Tensors, V
from tests.unit.models.test_draft_formats import (
    VARIANTS,
    as_speculators,
    close,
    expected_eagle,
    expected_eagle3,
    load,
    passes,
)

EAGLE3: dict[str, Any] = {**CONFIG, "draft_vocab_size": VD}
# The keys of ModelOpt's template. In its code, an id of eagle_config is the number of a layer whose output is read.
MODELOPT: dict[str, Any] = {
    **EAGLE3,
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "rope_scaling": {"rope_type": "default", "rope_theta": 300.0},
    "rope_theta": None,
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": None,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, LAYERS // 2 - 1, LAYERS - 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    },
}
MODELOPT_ROPE = Semantics(theta=300.0)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    torch.set_num_threads(1)
    return dc.target()


def exported(tensors: Tensors, first: str, deep: str = "", deep_norm: str = "input_layernorm") -> Tensors:
    """`tensors` by ModelOpt's names, without t2d: layer 0 is `first`, layer 1 is `deep` with the norm `deep_norm`."""
    names = {"midlayer.": first, "layers.1.input_layernorm": f"{deep}{deep_norm}", "layers.1.": deep}
    written = {}
    for key, tensor in tensors.items():
        old = next((name for name in names if key.startswith(name)), "")
        written[names.get(old, "") + key.removeprefix(old)] = tensor
    del written["t2d"]
    return written


@pytest.mark.parametrize("first", ["midlayer.", "layers.0."])
def test_modelopt_head_of_one_layer_computes_the_formula(tmp_path: Path, target: TargetModel, first: str) -> None:
    tensors = dc.eagle3_tensors()
    head = load(dc.write(tmp_path / "modelopt", exported(tensors, first), MODELOPT), target)
    assert isinstance(head, Eagle3Head)
    assert head.aux_boundaries == (2, LAYERS // 2, LAYERS - 3)
    close(passes(head), expected_eagle3(tensors, target, head, MODELOPT_ROPE))
    usual = load(dc.write(tmp_path / "usual", tensors, {**EAGLE3, "rope_theta": 300.0}), target)
    assert isinstance(usual, Eagle3Head)
    for mine, theirs in zip(passes(head), passes(usual), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(head.target_ids(torch.arange(VD)), usual.target_ids(torch.arange(VD)))
    assert head.t2d is not None
    assert torch.equal(head.t2d, tensors["t2d"])


@pytest.mark.parametrize(
    ("first", "deep", "deep_norm"),
    [
        ("midlayer.0.", "midlayer.1.", "input_layernorm"),  # from transformers' models
        ("midlayer.0.", "midlayer.1.", "hidden_norm"),  # from Megatron's
        ("layers.0.", "layers.1.", "input_layernorm"),  # in later versions
    ],
)
def test_modelopt_head_of_two_layers_computes_the_formula(
    tmp_path: Path, target: TargetModel, first: str, deep: str, deep_norm: str
) -> None:
    tensors = dc.eagle3_tensors() | dc.layer_tensors("layers.1.", norms=("input_layernorm",))
    written = exported(tensors, first, deep, deep_norm)
    assert any(key.startswith(deep) for key in written)
    head = load(dc.write(tmp_path, written, {**MODELOPT, "num_hidden_layers": 2}), target)
    assert head.config.num_layers == 2
    close(passes(head), expected_eagle3(tensors, target, head, MODELOPT_ROPE))


def test_modelopts_parallel_heads_are_ignored_with_a_warning(
    tmp_path: Path, target: TargetModel, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = dc.eagle3_tensors()
    more = {"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.ones(H, H)}
    with caplog.at_level(logging.WARNING):
        head = load(dc.write(tmp_path, exported(tensors, "midlayer.") | more, MODELOPT), target)
    assert "1 tensors of parallel heads are ignored" in caplog.text
    close(passes(head), expected_eagle3(tensors, target, head, MODELOPT_ROPE))


def test_undeclared_draft_vocabulary_is_that_of_the_tensors(tmp_path: Path, target: TargetModel) -> None:
    tensors = dc.eagle3_tensors()
    for number, edit in enumerate((dict[str, Any](), {"draft_vocab_size": None})):
        config = {**CONFIG, **edit}
        head = load(dc.write(tmp_path / str(number), exported(tensors, "midlayer."), config), target)
        assert head.draft_vocab_size == VD
        close(passes(head), expected_eagle3(tensors, target, head))


def _repeat(t: Tensors) -> None:
    t["d2t"][1] = t["d2t"][0] - 1


def _negative(t: Tensors) -> None:
    t["d2t"][0] = -1


MAP_ERRORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "repeated ids": (_repeat, "distinct ids, found 1 repeated"),
    "negative ids": (_negative, r"ids in 0\.\.47, found -1\.\."),
    "absolute table": (lambda t: t["d2t"].add_(torch.arange(VD)), r"ids in 0\.\.47"),
    "shorter than the head": (lambda t: t.update(d2t=t["d2t"][:7]), r"d2t: expected shape \[20\], found \[7\]"),
    "two columns": (lambda t: t.update(d2t=t["d2t"].view(2, -1)), r"d2t: expected shape \[20\], found \[2, 10\]"),
    "floats": (lambda t: t.update(d2t=t["d2t"].float()), "d2t: expected integers, found torch.float32"),
    "no map": (lambda t: t.pop("d2t"), "d2t: missing; a draft vocabulary of 20"),
}


@pytest.mark.parametrize("name", MAP_ERRORS)
def test_wrong_map_without_t2d_is_refused_in_one_line(tmp_path: Path, target: TargetModel, name: str) -> None:
    edit, message = MAP_ERRORS[name]
    tensors = exported(dc.eagle3_tensors(), "midlayer.")
    edit(tensors)
    directory = dc.write(tmp_path, tensors, MODELOPT)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_draft(directory, target, Loading(context=CONTEXT, progress=False))
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def _bias(prefix: str, names: str, rows: dict[str, int]) -> Tensors:
    return {f"{prefix}{name}_proj.bias": torch.randn(rows[name]) for name in names.split()}


QKV = _bias("midlayer.self_attn.", "q k v", {"q": 4 * D, "k": 2 * D, "v": 2 * D})
DISAGREEMENTS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "attention bias undeclared": (QKV, {"attention_bias": False}, "attention_bias is false, but the files hold"),
    "attention bias absent": ({}, {"attention_bias": True}, "attention_bias is true, but the files lack"),
    "qkv bias absent": ({}, {"qkv_bias": True}, "qkv_bias is true, but the files lack"),
    "mlp bias absent": ({}, {"mlp_bias": True}, "mlp_bias is true, but the files lack"),
    "fc bias undeclared": ({"fc.bias": torch.randn(H)}, {"bias": False}, "bias is false, but the files hold fc.bias"),
    "fc bias absent": ({}, {"bias": True}, "bias is true, but the files lack fc.bias"),
    "layers of the target": ({}, {"num_hidden_layers": 40}, "num_hidden_layers is 40, but the files hold 1"),
    "KV heads": ({}, {"num_key_value_heads": 4}, "num_key_value_heads is 4, but the files hold 2"),
    "KV heads absent": ({}, {"num_key_value_heads": None}, ""),
    "head size absent": ({}, {"head_dim": None}, ""),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_eagle3_head_follows_its_tensors(
    tmp_path: Path, target: TargetModel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    more, edit, warning = DISAGREEMENTS[name]
    tensors = dc.eagle3_tensors()
    config = {**EAGLE3, **edit}
    if name == "head size absent":  # a width that is no multiple of the heads' size
        more, tensors = {"embed_tokens.weight": torch.randn(V, 16)}, dc.eagle3_tensors(hidden=16)
        config.update(hidden_size=16, target_hidden_size=H)
    tensors |= more
    with caplog.at_level(logging.WARNING, logger="eagle_server"):
        head = load(dc.write(tmp_path, tensors, config), target)
    assert caplog.text.count("the tensors count") == (1 if warning else 0)
    assert warning in caplog.text
    close(passes(head), _with_fc_bias(tensors, target, head))


def _with_fc_bias(w: Tensors, target: TargetModel, head: Any) -> list[Tensor]:
    """The reference forward. It has no fc bias, so that one is added as a further input of ones."""
    if "fc.bias" not in w:
        return expected_eagle3(w, target, head)
    combine, bias = dc.reference_combine, w["fc.bias"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dc, "reference_combine", lambda tensors, features: combine(tensors, features) + bias)
        return expected_eagle3(w, target, head)


@pytest.mark.parametrize("held", [True, False])
def test_eagle_fc_bias_follows_the_tensors(
    tmp_path: Path, target: TargetModel, held: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = dc.eagle_tensors(bias=held)
    with caplog.at_level(logging.WARNING):
        head = load(dc.write(tmp_path, tensors, {**CONFIG, "bias": not held}), target)
    assert f"bias is {str(not held).lower()}, but the files {'hold' if held else 'lack'} fc.bias" in caplog.text
    close(passes(head), expected_eagle(tensors, target, head))


def test_gap_in_the_numbers_of_layers_is_refused(tmp_path: Path, target: TargetModel) -> None:
    tensors = dc.eagle3_tensors() | dc.layer_tensors("layers.2.", norms=("input_layernorm",))
    with pytest.raises(CheckpointError, match=r"the layers are numbered \[0, 2\], not from 0 on"):
        load(dc.write(tmp_path, tensors, EAGLE3), target)


def test_deep_head_is_served_with_the_texts_of_plain_decoding(tmp_path: Path, target: TargetModel) -> None:
    """Each layer of the head has KV of its own; prompts come in chunks."""
    tensors = dc.eagle3_tensors() | dc.layer_tensors("layers.1.", norms=("input_layernorm",))
    written = exported(tensors, "midlayer.0.", "midlayer.1.")
    head = load(dc.write(tmp_path, written, {**MODELOPT, "num_hidden_layers": 2}), target)
    requests = [request(i, range(1, 5 + 4 * i), max_tokens=20, ignore_eos=True) for i in range(3)]
    settings = {"context_length": 40, "chunked_prefill_size": 5}
    expected = tokens_of(run(plain(target, **settings), requests))
    engine = speculative(target, head, **settings)  # type: ignore[arg-type]
    draft_pool = pools(engine)[1]
    assert draft_pool is not None and len(draft_pool.keys) == 2
    assert tokens_of(run(engine, requests)) == expected


GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
}


@pytest.mark.parametrize("layout", ["SpecForge", "ModelOpt", "speculators"])
def test_heads_of_every_layout_draft_for_gpt_oss(tmp_path: Path, layout: str) -> None:
    """Plain heads of a Llama layer, as lmsys, NVIDIA and Red Hat publish them."""
    large, tensors = dc.target(seed=3, **GPT_OSS), dc.eagle3_tensors()
    written, config, how = {
        "SpecForge": (tensors, {**EAGLE3, "architectures": ["LlamaForCausalLMEagle3"]}, Semantics()),
        "ModelOpt": (exported(tensors, "midlayer."), MODELOPT, MODELOPT_ROPE),
        "speculators": (
            {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()},
            as_speculators(VARIANTS["plain"]),
            Semantics(),
        ),
    }[layout]
    head = load(dc.write(tmp_path, written, config), large)
    close(passes(head), expected_eagle3(tensors, large, head, how))
    requests = [request(i, range(1, 5 + 4 * i), max_tokens=16, ignore_eos=True) for i in range(3)]
    settings = {"context_length": 40, "chunked_prefill_size": 5}
    expected = tokens_of(run(plain(large, **settings), requests))
    engine = speculative(large, head, **settings)
    assert tokens_of(run(engine, requests)) == expected
    assert engine.stats().drafted_tokens > 0
