"""Drafts in GGUF files: MTP layers in the target's own file, and heads in files of their own."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_server.config import DEMO_TARGET, parse_args
from eagle_server.engine.assembly.from_config import build_engine, with_directory
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.gguf.directory import directory_of
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import open_weights
from eagle_server.models.config import CheckpointError
from eagle_server.models.layers import Linear
from tests.parity.checkpoints import CASES, write
from tests.parity.gguf_checkpoints import opened, own_cache
from tests.parity.test_mtp_parity import check_greedy_chain, mtp_of, save_beside
from tests.support.engines import request, run, tokens_of
from tests.support.gguf_files import write_gguf
from tests.support.gguf_heads import write_head

__all__ = ["own_cache"]
pytestmark = pytest.mark.usefixtures("own_cache")
STEADY = ("--max-total-tokens", "1024", "--speculative-adaptive", "off", "--speculative-num-steps", "4")
DEMO_HEADS = {"EAGLE3": DEMO_TARGET.with_name("eagle3"), "DFLASH": DEMO_TARGET.with_name("block")}
MTP = {"glm4-moe": "deepseek", "qwen3.5": "qwen", "qwen3.5-moe": "qwen"}


def texts(flags: list[str], algorithm: str) -> object:
    """Texts of the engine that these options make, which must draft with `algorithm`, if it is not NONE."""
    requests = [request(i, list(range(3 + i, 30)), temperature=0.7 * (i % 2), seed=i, max_tokens=40) for i in range(6)]
    common = ["--context-length", "96", "--max-total-tokens", "2048"]
    more = ["--speculative-algorithm", "NONE"] if algorithm == "NONE" else []
    engine = build_engine(parse_args([*flags, *common, *more], environ={}), progress=False)
    tokens = tokens_of(run(engine, requests))
    assert engine.ready().speculative_algorithm == algorithm
    assert (engine.stats().accepted_tokens > 0) == (algorithm != "NONE")
    return tokens


def make_predictable(source: Path) -> None:
    """Layers that add next to nothing: the next token follows from the last one, also in the MTP layer."""
    tensors = load_file(source / "model.safetensors")
    hidden = len(tensors["model.norm.weight"])
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = tensor * 1e-3
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            tensors[name] = torch.eye(hidden, 2 * hidden)
        elif name.endswith(("shared_head.norm.weight", "mtp.norm.weight")):
            tensors[name] = tensors["model.norm.weight"].clone()
        elif name.endswith(("enorm.weight", "pre_fc_norm_embedding.weight")):
            tensors[name] = torch.full_like(tensor, float("enorm" in name))  # Qwen's norms multiply by 1 + weight
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize("case", MTP)
def test_mtp_layers_in_the_file_draft_what_transformers_drafts(case: str, tmp_path: Path) -> None:
    theirs = write(CASES[case], tmp_path / "source")
    mtp = mtp_of(theirs)
    save_beside(mtp, tmp_path / "source", MTP[case])
    check_greedy_chain(opened(tmp_path / "source"), theirs, mtp)


@pytest.mark.parametrize("has_norm", [True, False])
def test_mtp_layers_in_a_file_of_their_own_draft(tmp_path: Path, has_norm: bool) -> None:
    """With embedding, lm_head and last norm of the model, which is also theirs where they have none."""
    source, alone = tmp_path / "source", tmp_path / "alone" / "source"
    theirs = write(CASES["qwen3.5"], source, max_position_embeddings=96)
    save_beside(mtp_of(theirs), source, "qwen")
    make_predictable(source)
    tensors = load_file(source / "model.safetensors")
    left_out = ("model.layers.",) if has_norm else ("model.layers.", "mtp.norm")
    alone.mkdir(parents=True)
    save_file({n: each for n, each in tensors.items() if not n.startswith(left_out)}, alone / "model.safetensors")
    (alone / "config.json").write_text((source / "config.json").read_text())
    save_file({n: each for n, each in tensors.items() if not n.startswith("mtp.")}, source / "model.safetensors")
    draft = opened(alone)
    assert any(name.endswith("shared_head.norm.weight") for name in open_weights(draft))
    flags = ["--model-path", str(source), "--speculative-draft-model-path", str(draft)]
    assert texts(flags, "NEXTN") == texts(flags[:2], "NONE")


@pytest.mark.parametrize("case", MTP)
def test_a_file_with_mtp_layers_drafts_with_them_unless_asked_not_to(case: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    width = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32} if "moe" in case else {}
    theirs = write(CASES[case], source, max_position_embeddings=96, **width)
    save_beside(mtp_of(theirs), source, MTP[case])
    make_predictable(source)
    if case == "glm4-moe":  # some files have copies
        tensors, layer = load_file(source / "model.safetensors"), theirs.config.num_hidden_layers
        for own, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            tensors[f"model.layers.{layer}.{own}.weight"] = tensors[f"{name}.weight"].clone()
        save_file(tensors, source / "model.safetensors")
    file = opened(source, "Q8_0", kinds={"ffn_gate_inp": "F32", "conv1d": "F32"})
    flags = ["--model-path", str(file)]
    assert texts(flags, "NEXTN") == texts(flags, "NONE")


def demo(head: Path, *more: str) -> tuple[object, int, int]:
    """Texts of the demo's target in float32, and how many tokens the head drafted and had accepted."""
    flags = [
        "--model-path",
        str(DEMO_TARGET),
        "--speculative-draft-model-path",
        str(head),
        "--max-total-tokens",
        "1024",
    ]
    config = with_directory(parse_args([*flags, *STEADY, *more], environ={}))
    engine = build_engine(config, progress=False)
    requests = [request(i, list(range(300 + 3 * i, 330)), temperature=0.7 * (i % 2), seed=i) for i in range(4)]
    tokens = tokens_of(run(engine, requests))
    return tokens, engine.stats().drafted_tokens, engine.stats().accepted_tokens


@pytest.mark.parametrize("algorithm", DEMO_HEADS)
def test_a_head_in_a_file_drafts_as_its_directory(algorithm: str, tmp_path: Path) -> None:
    """In float32: the same drafts, bit for bit. A config.json beside the file, of the target, is not the head's."""
    source = DEMO_HEADS[algorithm]
    (tmp_path / "config.json").write_text((DEMO_TARGET / "config.json").read_text())
    file = write_head(source, tmp_path / "head.gguf", "BF16")
    rounding = ("--speculative-draft-quantization", "none")
    expected = demo(source, *rounding)
    assert demo(file, *rounding) == expected
    assert expected[2] > 0
    assert demo(file, *rounding, "--speculative-algorithm", algorithm) == expected


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("algorithm", DEMO_HEADS)
def test_blocks_of_a_head_are_computed_as_they_are(
    algorithm: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_head(
        DEMO_HEADS[algorithm], tmp_path / "head.gguf", kind, kinds={"markov": "Q8_0", "confidence": "F32"}
    )
    target: Any = load_target(DEMO_TARGET, Loading(progress=False))
    with caplog.at_level(logging.INFO):
        head: Any = load_draft(directory_of(file, tokenizer=False, alone=True), target, Loading(progress=False))
    assert re.search(rf"weights in {kind}.* are computed as they are", caplog.text)
    linears = [module for module in head.modules() if isinstance(module, Linear)]
    assert linears and all(8 * each.nbytes < 10 * each.native[0].outputs * each.native[0].inputs for each in linears)
    exact = open_weights(directory_of(file, tokenizer=False, alone=True))
    fc = next(each for each in linears if each.parts[0][0] == "fc")
    assert torch.equal(fc.dense_weight(), exact["fc.weight"].read())
    tokens, drafted, accepted = demo(file)
    assert tokens == demo(DEMO_HEADS[algorithm])[0] and 0 < accepted < drafted


@pytest.mark.parametrize(
    ("algorithm", "given", "reason"),
    [
        ("EAGLE3", {"values": {"target_layers": None}}, "eagle3.extract_layers is missing"),
        ("EAGLE3", {"values": {"target_layers": [2, 8, 20]}}, r"strictly increasing boundaries in 0..16"),
        ("EAGLE3", {"values": {"target_hidden_size": 512}}, "for targets of width 512"),
        ("EAGLE3", {"values": {"norm_before_fc": True}}, "norm_before_fc: config.json says True, but the file lacks"),
        ("EAGLE3", {"more": "blk.0.attn_q.bias_2"}, "the tensor blk.0.attn_q.bias_2 is not known in this architecture"),
        ("EAGLE3", {"more": "d2t.weight"}, "the tensor d2t.weight is not known in this architecture"),
        ("DFLASH", {"values": {"block_size": None}}, "dflash.block_size is missing"),
        ("DFLASH", {"values": {"tokenizer.ggml.mask_token_id": None}}, "mask_token_id: a token id in 0..4095"),
        ("DFLASH", {"values": {"logit_scale": 2.0}}, "dflash.logit_scale: only 1.0 is supported in GGUF"),
        ("DFLASH", {"more": "selector_hidden.weight"}, "the tensor selector_hidden.weight is not known"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_head_that_cannot_be_read_is_named(
    algorithm: str, given: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    file = write_head(DEMO_HEADS[algorithm], tmp_path / "head.gguf", **given)
    with pytest.raises(CheckpointError, match=reason):
        demo(file)


def test_a_head_in_the_place_of_a_model_is_refused(tmp_path: Path) -> None:
    file = write_head(DEMO_HEADS["EAGLE3"], tmp_path / "head.gguf")
    for flags in (["--model-path"], ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path"]):
        target = ["--model-path", str(DEMO_TARGET)] if len(flags) > 1 else []
        with pytest.raises(CheckpointError, match="a draft head, no model; name it with --speculative-draft-model-pa"):
            with_directory(parse_args([*target, *flags, str(file)], environ={}))


def test_a_norm_before_fc_and_the_older_name_of_the_streams(tmp_path: Path) -> None:
    """A head of a file without a map, whose embedding and lm_head are the target's."""
    tensors, config = load_file(DEMO_HEADS["EAGLE3"] / "model.safetensors"), DEMO_HEADS["EAGLE3"] / "config.json"
    raw = json.loads(config.read_text()) | {"draft_vocab_size": 4096, "norm_before_fc": True}
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 768)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(raw | {"norm_before_residual": True}))
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    values = {"target_layers": None, "extract_layers": [2, 8, 13]}
    file = write_head(tmp_path / "source", tmp_path / "head.gguf", "BF16", values=values)
    rounding = ("--speculative-draft-quantization", "none")
    assert demo(file, *rounding) == demo(tmp_path / "source", *rounding)


def test_a_smaller_model_in_a_file_drafts(tmp_path: Path) -> None:
    """The target itself, with the tokenizer that is beside the file."""
    (tmp_path / "tokenizer.json").write_text((DEMO_TARGET / "tokenizer.json").read_text())
    file = write_gguf(DEMO_TARGET, tmp_path / "small.gguf", "BF16")
    alone = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-quantization", "none")
    tokens, _, accepted = demo(file, *alone)
    assert tokens == demo(DEMO_HEADS["EAGLE3"])[0] and accepted > 0
    with pytest.raises(CheckpointError, match="add --speculative-algorithm STANDALONE"):
        demo(file)
