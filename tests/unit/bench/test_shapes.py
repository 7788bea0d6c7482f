"""The benchmark of layers in published sizes: what it counts, and that it runs. Its seconds are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_server.ops.native.library import available
from eagle_tools.bench import shapes

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
EXPERTS |= {"num_local_experts": 4}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "shared_intermediate_size": 48}
RECURRENT = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2},
}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
OWN = {
    "qwen3.5-0.8b": RECURRENT,
    "granite-4.0-h-1b": {**MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2-1.2b": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "deepseek-v2-lite": {**EXPERTS, **LATENT, "head_dim": 4, "num_key_value_heads": 4},
}
ATTENTION = 32 * 8 * (4 + 2 + 2) + 32 * 32  # weights of qkv and o
READ = {  # numbers of two layers
    "qwen3-30b-a3b": 2 * (ATTENTION + 4 * 3 * 32 * 16),
    "glm-4.5-air": 2 * (ATTENTION + 5 * 3 * 32 * 16),
    "gpt-oss-20b": 2 * (ATTENTION + 4 * 3 * 32 * 48),
    # a recurrent layer with its state, its 8 gates padded to 16, and one that attends, whose queries have gates
    "qwen3.5-0.8b": 32 * (64 + 32 + 16) + 32 * 32 + 4 * 8 * 8 + ATTENTION + 32 * 32 + 2 * 3 * 32 * 48,
    # the projections of z, x, B, C and dt, 148 outputs padded to 160, and the state
    "granite-4.0-h-1b": 32 * 160 + 64 * 32 + 4 * 8 * 16 + ATTENTION + 2 * 3 * 32 * 48,
    "lfm2-1.2b": 32 * 96 + 32 * 32 + ATTENTION + 2 * 3 * 32 * 48,
    # the latent with its rotated part, 20 outputs padded to 32, queries, o, W_UK and W_UV; an MLP; experts, two shared
    "deepseek-v2-lite": 2 * (32 * 32 + 32 * 48 + 32 * 32 + 4 * 16 * 16) + 3 * 32 * 48 + (4 + 2) * 3 * 32 * 16,
}


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_a_step_reads_all_weights_when_all_experts_are_chosen(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OWN.get(shape, EXPERTS)
    monkeypatch.setitem(shapes.SHAPES, shape, {**shapes.SHAPES[shape], **TINY, **own})
    monkeypatch.setattr(shapes, "READ", 1000)
    monkeypatch.setattr(shapes, "PAUSE", 0.0)
    out = tmp_path / "numbers.json"
    given = ["--shape", shape, "--layers", "2", "--rows", "1", "3", "--steps", "2", "--threads", "1"]
    assert shapes.main([*given, "--dtype", "float32", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["must_read"] for row in rows if row["name"] == "native"] == [4 * READ[shape]] * 2
    theirs = {"transformers"} if "num_experts" not in own else {f"transformers, {name}" for name in shapes.EXPERTS}
    assert {row["name"] for row in rows} == {"native", *theirs}
    assert all(row["seconds"] > 0 for row in rows)
