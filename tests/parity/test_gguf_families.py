"""GGUF files of gpt-oss, LFM2, GLM-4 MoE, Qwen3-Next and Qwen3.5 have the logits of the same weights in safetensors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quants
from safetensors.torch import load_file, save_file

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.fused_experts import single_experts
from eagle_server.models.checkpoints.gguf.tensors import read_index
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.checkpoints.weights import open_weights
from eagle_server.models.config import CheckpointError
from eagle_server.models.layers import Linear
from tests.parity.gguf_checkpoints import WIDE, assert_speculates_losslessly, checkpoint, logits, opened, own_cache
from tests.parity.test_mxfp4 import written as mxfp4
from tests.support.engines import CONTEXT, MARGIN, plain, random_head, request, run, speculative, tokens_of
from tests.support.gguf_files import tiled
from tests.support.k_quants import K_QUANTS, k_quantized

__all__ = ["own_cache"]
pytestmark = pytest.mark.usefixtures("own_cache")


def round_matrices(source: Path, kind: str, kept: str) -> None:
    """The checkpoint with the numbers that a file of this type has. kept: a part of the names of those that stay."""
    tensors, quantized = load_file(source / "model.safetensors"), GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point() and not (kept in name or name.endswith("bias")):
            blocks = quants.quantize(tensor.numpy(), quantized)
            tensors[name] = torch.from_numpy(dequantize(blocks, quantized)).float()
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_gpt_oss_has_the_logits_of_its_directory(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sinks, windows, biases, and experts in MXFP4, which are the same numbers in another order."""
    source = tmp_path / "source"
    chosen = 6 if kind == "Q8_0" else 3  # all, as rounded inputs make other choices
    mxfp4(source, swiglu_limit=7.0, max_position_embeddings=CONTEXT, num_experts_per_tok=chosen)
    round_matrices(source, kind, "router")
    with caplog.at_level(logging.INFO):
        directory = opened(source, kind, kinds={"ffn_gate_inp": "F32"})
        packed = logits(directory, pack=True)
    assert "weights in MXFP4 are computed as they are" in caplog.text
    stored, expected = open_weights(directory), single_experts(open_weights(source))
    assert {*stored} == {*expected}
    assert all(torch.equal(stored[name].read().float(), tensor.read()) for name, tensor in expected.items())
    exact = logits(source)
    assert torch.equal(logits(directory), exact)
    if kind == "Q8_0":  # inputs are rounded to 8 bits
        assert (packed - exact).norm() < 0.1 * exact.norm()
    else:
        assert torch.equal(packed, logits(source, pack=True))


def test_types_that_no_kernel_computes_in_one_layer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = checkpoint("gpt-oss", tmp_path / "source", swiglu_limit=7.0)
    kinds = {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "Q8_0", "ffn_down_exps": "MXFP4", "attn_k": "F32"}
    directory = opened(source, "Q8_0", kinds=kinds | {"ffn_gate_inp": "F32"})
    with caplog.at_level(logging.WARNING):
        packed = logits(directory, pack=True)
    experts, attention = "layers.2.mlp.experts.0.gate_proj.weight", "layers.2.self_attn.q_proj.weight"
    assert any(experts in line and "no kernel computes their types in one layer" in line for line in caplog.messages)
    assert any(attention in line and "weights of the layer are not quantized" in line for line in caplog.messages)
    assert not any("down_proj" in line or "o_proj" in line for line in caplog.messages)
    assert packed.isfinite().all()


OTHERS = {  # what files do not say is as llama.cpp computes it
    "lfm2": ("lfm2", {}),
    "lfm2-biases-untied": ("lfm2-biases-own-width-untied", {}),
    "lfm2-moe": ("lfm2-moe", {}),
    "glm4-moe": ("glm4-moe", {}),
    "glm4-moe-groups": ("glm4-moe-groups-quarter-rotated", {}),
    "qwen3-next": ("qwen3-next", {"mlp_only_layers": []}),
    "qwen3.5": ("qwen3.5", {}),
    "qwen3.5-moe": ("qwen3.5-moe", {}),
    "qwen3.5-three-value-heads-tied": ("qwen3.5-odd-sizes-tied", {"attention_bias": False}),
}


WHOLE_BLOCKS = {
    "lfm2-moe": {"moe_intermediate_size": 32, "num_experts_per_tok": 8},
    "glm4-moe": {"moe_intermediate_size": 32, "num_experts_per_tok": 8},
    "glm4-moe-groups-quarter-rotated": {"moe_intermediate_size": 32, "num_experts_per_tok": 8, "topk_group": 4},
    "qwen3-next": {"moe_intermediate_size": 32, "num_experts_per_tok": 6, "shared_expert_intermediate_size": 32},
    "qwen3.5": {"linear_value_head_dim": 32},
    "qwen3.5-moe": {
        **{"moe_intermediate_size": 32, "num_experts_per_tok": 6, "shared_expert_intermediate_size": 32},
        "linear_value_head_dim": 32,
    },
    "qwen3.5-odd-sizes-tied": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
}


def make_exact(source: Path) -> None:
    """Norms that are the same after + 1 and - 1, and logarithms of numbers that float32 holds."""
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = (tensor * 256).round() / 256
        if name.endswith("A_log"):
            tensors[name] = tensor.exp().log().exp().log()
            assert torch.equal(tensors[name].exp().log(), tensors[name])
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_have_the_logits_of_their_directories(name: str, tmp_path: Path) -> None:
    case, changes = OTHERS[name]
    source = checkpoint(case, tmp_path / "source", **changes, max_position_embeddings=CONTEXT)
    if "qwen" in name:
        make_exact(source)
    directory = opened(source)
    stored, expected = open_weights(directory), open_weights(source)
    if name == "qwen3-next":  # its projections are named as Qwen3.5's
        torch.testing.assert_close(logits(directory), logits(source), atol=1e-4, rtol=0)
    else:
        assert {*stored} == {*expected}
        assert all(torch.equal(stored[key].read(), tensor.read()) for key, tensor in expected.items())
        assert torch.equal(logits(directory), logits(source))


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_of_other_families_are_computed_as_they_are(name: str, tmp_path: Path) -> None:
    """Rounded inputs would make other choices, so logits are compared where all experts are chosen."""
    case, changes = OTHERS[name]
    source = checkpoint(
        case, tmp_path / "source", **changes, **WHOLE_BLOCKS.get(case, {}), max_position_embeddings=CONTEXT
    )
    directory = opened(source, "Q8_0", kinds={"ffn_gate_inp": "F32", "conv.weight": "F32", "conv1d": "F32"})
    exact, near, original = logits(directory), logits(directory, pack=True), logits(source)
    assert (near - exact).norm() < 2 * (exact - original).norm()  # inputs are rounded as weights are
    target: Any = load_target(directory, Loading(context=CONTEXT, lookahead=MARGIN, progress=False), dtype="bfloat16")
    assert target.is_fused
    for weight in (each.native[0] for each in target.modules() if isinstance(each, Linear)):
        outputs, inputs = 16 * -(-weight.outputs // 16), 64 * -(-weight.inputs // 64)  # as they are packed
        assert 8 * weight.nbytes < 10 * outputs * inputs
    assert_speculates_losslessly(target)


@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5-moe"])
def test_bf16_files_of_qwen_3_5_have_the_logits_of_their_directories(case: str, tmp_path: Path) -> None:
    source = checkpoint(case, tmp_path / "source", max_position_embeddings=CONTEXT)
    make_exact(source)
    tensors = load_file(source / "model.safetensors")
    rounded = {name: tensor.bfloat16().float() if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(rounded, source / "model.safetensors")
    assert torch.equal(logits(opened(source, "BF16")), logits(source))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("size", [32, 64])  # of a value head: 256 inputs are eight, or four
def test_value_heads_are_put_back_whatever_block_they_share(
    kind: str, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits are those of the file's blocks multiplied out, bit for bit in float32."""
    wide = WIDE | {"linear_value_head_dim": size, "linear_num_value_heads": 256 // size}
    source = checkpoint("qwen3.5", tmp_path / "source", **wide, head_dim=64, max_position_embeddings=CONTEXT)
    make_exact(source)
    directory = opened(source, kind, kinds={"conv1d": "F32"})
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    columns = tiled("out_proj", torch.arange(256)[None], config)[0]
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            is_tiled, array = "out_proj" in name, tensor.numpy()
            array = array[:, columns] if is_tiled else array
            quantized = GGMLQuantizationType[kind]
            blocks = k_quantized(array, kind) if kind in K_QUANTS else quants.quantize(array, quantized)
            rounded = torch.from_numpy(dequantize(blocks, quantized)).float()
            tensors[name] = rounded[:, columns.argsort()].contiguous() if is_tiled else rounded
    original = logits(source)
    save_file(tensors, source / "model.safetensors")
    exact = logits(source)
    assert torch.equal(logits(directory), exact)
    caplog.clear()
    near = logits(directory, pack=True)
    assert "multiplied out" not in caplog.text
    assert (near - exact).norm() < 2 * (exact - original).norm()
    target: Any = load_target(directory, Loading(context=CONTEXT, lookahead=MARGIN, progress=False), dtype="bfloat16")
    assert target.is_fused
    assert torch.equal(
        target.layers[0].attention.out.dense_weight(), tensors["model.layers.0.linear_attn.out_proj.weight"]
    )
    assert_speculates_losslessly(target)


def test_heads_that_are_no_whole_blocks_are_multiplied_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = opened(checkpoint("qwen3.5", tmp_path / "source"), "Q8_0", kinds={"conv1d": "F32"})
    with caplog.at_level(logging.INFO):
        load_target(directory, Loading(progress=False))
    assert "weights in Q8_0 are computed as they are" in caplog.text
    assert "weights in Q8_0 are multiplied out to 16 bits" in caplog.text


def test_gates_and_up_projections_in_one_tensor(tmp_path: Path) -> None:
    """As later converters write experts."""
    source = checkpoint("qwen3.5-moe", tmp_path / "source", max_position_embeddings=CONTEXT)
    make_exact(source)
    expected = logits(source)
    directory = opened(source, fuse_gate_up=True)
    assert any("ffn_gate_up_exps" in place.key for place in read_index(directory)[1].values())
    assert torch.equal(logits(directory), expected)


def test_an_eagle_3_head_beside_gpt_oss_in_a_file(tmp_path: Path) -> None:
    mxfp4(tmp_path / "source", swiglu_limit=7.0, max_position_embeddings=CONTEXT)
    directory = opened(tmp_path / "source", "Q8_0", kinds={"ffn_gate_inp": "F32"})
    how = Loading(context=CONTEXT, lookahead=MARGIN, progress=False)
    target: Any = load_target(directory, how, dtype="bfloat16")
    config = json.loads((directory / "config.json").read_text())
    raw = {key: config[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    raw |= {key: config[key] for key in ("head_dim", "intermediate_size", "rope_parameters")}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {
        "draft_vocab_size": raw["vocab_size"],
        "attention_bias": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    save_checkpoint(random_head(target, "EAGLE3"), tmp_path / "head", {**raw, **own})
    head = load_draft(tmp_path / "head", target, how)
    requests = [request(i, list(range(3 + i, 30)), temperature=0.7 * (i % 2), seed=i) for i in range(3)]
    engine = speculative(target, head)
    assert tokens_of(run(engine, requests)) == tokens_of(run(plain(target), requests))
    assert engine.stats().drafted_tokens > 0


@pytest.mark.parametrize(
    ("case", "given", "reason"),
    [
        ("glm4-moe", {"values": {"expert_gating_func": 1}}, r"expert_gating_func: only sigmoid \(2\) is supported"),
        (
            "qwen3-next",
            {"more": {"blk.0.ssm_in.weight": torch.ones(4, 64).numpy()}},
            "blk.0.ssm_in.weight is not known",
        ),
        ("gpt-oss", {"values": {"attention.sliding_window": None}}, "gpt-oss.attention.sliding_window is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_named(case: str, given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = checkpoint(case, tmp_path / "source", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=reason):
        opened(source, **given)
