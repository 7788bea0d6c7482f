"""gpt-oss's experts in MXFP4: the numbers are those of transformers, and so are the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from eagle_server.config import parse_args
from eagle_server.engine.assembly.memory_estimate import memory_estimate
from eagle_server.models.checkpoints.fused_experts import mxfp4_weight, single_experts
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import StoredTensor
from eagle_server.models.config import CheckpointError
from eagle_server.models.layers import Linear
from eagle_server.models.moe import ExpertLinear
from tests.parity.checkpoints import CASES, VOCAB, write
from tests.parity.test_target_parity import TOLERANCE, Pages

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def written(directory: Path, **settings: Any) -> PreTrainedModel:
    """The toy with its experts in random blocks, and transformers' model with the same numbers."""
    theirs = write(CASES["gpt-oss"], directory, **settings)
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(0)
    tensors, state = load_file(file), theirs.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, file)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": CONFIG}))
    return theirs


def test_every_byte_and_scale_has_transformers_number() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.tensor([1, 60, 100, 119, *range(121, 131), 150, 250], dtype=torch.uint8).view(1, 16)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.bfloat16)
    found = mxfp4_weight(blocks, scales).dense()
    assert torch.equal(found.bfloat16().t(), expected[0])
    assert torch.equal(found.bfloat16().float(), found), "bfloat16 holds them exactly"


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_equal_transformers(tmp_path: Path, dtype: Any) -> None:
    theirs = written(tmp_path)
    ours: Any = load_target(tmp_path, Loading(progress=False), dtype=dtype)
    tokens = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens[None]).logits[0]
    pages = Pages(ours, 1, 3)
    found = torch.cat([pages.logits([tokens], [a], [b])[0] for a, b in ((0, 19), (19, 30))])
    if dtype == "float32":
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    else:  # as near as transformers' own bfloat16
        rounded = theirs.bfloat16()(tokens[None]).logits[0].float()
        assert (found - expected).norm() < 1.5 * (rounded - expected).norm()
    packed = [module for module in ours.modules() if isinstance(module, ExpertLinear)]
    assert ours.is_fused and {part.native[0].quantization for part in packed} == {"mxfp4"}
    plain: Any = load_target(tmp_path, Loading(progress=False, pack=False), dtype=dtype)
    others = sum(each.nbytes for each in plain.parameters()) - sum(
        module.nbytes for module in plain.modules() if isinstance(module, ExpertLinear)
    )
    held = others + sum(part.native[0].outputs * part.native[0].inputs * 4.25 / 8 for part in packed)
    flags = ["--model-path", str(tmp_path), "--dtype", dtype, "--speculative-algorithm", "NONE"]
    dense = sum(each.nbytes for each in plain.parameters())
    for kernels, size in (("auto", held), ("torch", dense)):
        estimate = memory_estimate(parse_args([*flags, "--cpu-kernels", kernels], environ={}))
        assert estimate["target_weights"] == pytest.approx(size, rel=0.01)


def test_quantization_rounds_the_other_layers_and_keeps_what_is_packed(tmp_path: Path) -> None:
    """Also from --quantization-cache, at the second start."""
    written(tmp_path / "target")
    logits = []
    for _ in range(2):
        ours: Any = load_target(
            tmp_path / "target", Loading(progress=False, quantization="int8"), quantization_cache=tmp_path / "kept"
        )
        linears = {name: module for name, module in ours.named_modules() if isinstance(module, Linear)}
        kinds = {name: linear.native[0].quantization for name, linear in linears.items() if linear.native is not None}
        assert {kinds["layers.1.mlp.experts.down"], kinds["layers.1.attention.qkv"]} == {"mxfp4", "int8"}
        [row] = Pages(ours, 1, 1).logits([torch.arange(9)], [0], [9])
        logits.append(row)
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert torch.equal(*logits)


def change(directory: Path, tensor: str, value: Tensor | None) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors[tensor]
    save_file(tensors if value is None else {**tensors, tensor: value}, file)


def test_what_is_no_mxfp4_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(CheckpointError, match="--quantization fp8: GptOssForCausalLM has experts, which only"):
        load_target(tmp_path, Loading(progress=False, quantization="fp8"))
    name = "model.layers.1.mlp.experts.down_proj"
    change(tmp_path, f"{name}_scales", None)
    with pytest.raises(CheckpointError, match=f"{name}_blocks: MXFP4 needs blocks .* scales None"):
        load_target(tmp_path, Loading(progress=False))
    change(tmp_path, f"{name}_blocks", torch.zeros(6, 64, 3, 8, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"found blocks \[6, 64, 3, 8\]"):
        load_target(tmp_path, Loading(progress=False))
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = "lm_head"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="modules_to_not_convert: a list of names is expected"):
        load_target(tmp_path, Loading(progress=False))


def test_experts_of_other_families_stay_as_they_are() -> None:
    """Theirs have no biases and another order."""
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight", "self_attn.sinks")
    stored = {f"model.layers.0.{name}": StoredTensor(Path("f"), name, (2, 4, 4), torch.empty) for name in names}
    assert single_experts(stored) == stored  # type: ignore[arg-type]
