"""Drafts in GGUF files: MTP layers in the target's own file, and heads in files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_server.config import parse_args
from eagle_server.engine.assembly.from_config import build_engine
from tests.parity.checkpoints import CASES, write
from tests.parity.gguf_checkpoints import opened, own_cache
from tests.parity.test_mtp_parity import check_greedy_chain, mtp_of, save_beside
from tests.support.engines import request, run, tokens_of

__all__ = ["own_cache"]
pytestmark = pytest.mark.usefixtures("own_cache")
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
