"""Targets of every family and format are loaded on the device that is asked for (see `test_drafts_on_a_device`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.fused_experts import mxfp4_weight
from eagle_server.models.checkpoints.load_target import created_as, load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.quantized import with_dequantized
from eagle_server.models.checkpoints.weights import QuantizedTensor, open_weights
from eagle_server.ops.linear.quantize import QuantizedWeight, quantize
from tests.parity import test_mxfp4, wrappers
from tests.parity import test_quantized_checkpoints as quantized
from tests.parity.checkpoints import CASES, write
from tests.support.ranks import rank_groups
from tests.support.second_device import SecondDevice, elsewhere
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models import test_rank_slices as slices

Maker = Callable[[Path], object]


def family(case: str, directory: Path) -> None:
    write(CASES[case], directory)


def wrapper(case: str, directory: Path) -> None:
    wrappers.write(wrappers.CASES[case], directory)


def packed(name: str, base: dict[str, Any], directory: Path) -> None:
    quantized.written(directory, *quantized.FORMATS[name][:2], base)


def awq(directory: Path) -> None:
    quantized.written(directory, {"quant_method": "awq", "bits": 4, "group_size": 32}, quantized.as_awq)


def quantized_whole(directory: Path, names: list[str]) -> None:
    """Quantize these layers of a checkpoint, embeddings included."""
    file, config = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(file)
    for name in names:
        tensors |= quantized.as_int8(name, tensors.pop(f"{name}.weight"))[0]
    save_file(tensors, file)
    scheme = {"quantization_config": quantized.compressed(8, "int", "channel")}
    config.write_text(json.dumps({**json.loads(config.read_text()), **scheme}))


def by_transformers(directory: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "num_hidden_layers": 2}
    olmo = CONFIG_MAPPING["olmo2"](**shape, num_attention_heads=4, eos_token_id=0, pad_token_id=None)
    AutoModelForCausalLM.from_config(olmo).save_pretrained(directory)


MAKERS: dict[str, Maker] = {
    **{name: partial(family, name) for name in CASES},
    **{f"text of {name}": partial(wrapper, name) for name in wrappers.CASES},
    **{name: partial(packed, name, quantized.CONFIG) for name in quantized.FORMATS},
    **{f"{name}, experts": partial(packed, name, quantized.EXPERTS) for name in quantized.FORMATS},
    "AWQ": awq,
    "MXFP4": partial(test_mxfp4.written, intermediate_size=128),
    "by transformers' code": by_transformers,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_target_is_on_the_device_that_is_asked_for(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path)
    with SecondDevice() as gpu:
        target = load_target(tmp_path, Loading(progress=False), dtype="bfloat16", device=gpu.device)
        assert elsewhere(target, gpu) == []


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_rounded_weights_are_there_too(quantization: Any, tmp_path: Path) -> None:
    quantized.written(tmp_path, {}, lambda name, weight: ({f"{name}.weight": weight}, weight))
    with SecondDevice() as gpu:
        target: Any = load_target(
            tmp_path, Loading(progress=False, quantization=quantization), dtype="bfloat16", device=gpu.device
        )
        draft = load_draft(
            *(tmp_path, target), Loading(context=64, progress=False, quantization=quantization), algorithm="STANDALONE"
        )
        assert target.layers[0].mlp.down.weight.numel() == 0  # only the rounded weight is kept
        assert target.lm_head._packed.rounded.codes.dtype == torch.float8_e4m3fn
        assert elsewhere((target, draft), gpu) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["llama-biases", "mimo-v2", "gpt-oss-odd-sizes", "qwen3-next", "GPTQ", "MXFP4"])
def test_the_share_of_a_rank_is_there_too(
    name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(quantized.CONFIG, "intermediate_size", 128)  # whole groups for both ranks
    MAKERS[name](tmp_path)
    with rank_groups(2) as (first, _, others), SecondDevice() as gpu:
        ranks = [first, *others][rank]
        target = load_target(tmp_path, Loading(progress=False), dtype="bfloat16", device=gpu.device, ranks=ranks)
        assert elsewhere(target, gpu) == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_of_a_split_target_reads_the_whole_vocabulary_to_the_device(tied: bool, tmp_path: Path) -> None:
    """The target's embedding and lm_head are quantized, and read while the draft is loaded."""
    slices.checkpoint(tmp_path / "target", {"vocab_size": dc.V, "tie_word_embeddings": tied, "num_hidden_layers": 8})
    names = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    quantized_whole(tmp_path / "target", names)
    draft = dc.write(tmp_path / "draft", dc.eagle_tensors(bias=True), dc.CONFIG)
    with rank_groups(2) as (first, _, _), SecondDevice() as gpu:
        target = load_target(
            tmp_path / "target", Loading(progress=False), dtype="bfloat16", device=gpu.device, ranks=first
        )
        head = load_draft(draft, target, Loading(context=64, progress=False), target_path=tmp_path / "target")
        assert elsewhere(head, gpu) == []


@pytest.mark.parametrize("name", quantized.LAYERS)
def test_every_quantized_layer_is_read_to_the_host(name: str) -> None:
    """As the packers' own libraries stored it, while models are created on another device."""
    parts = {key.removeprefix(f"{name}."): value for key, value in load_file(quantized.GOLDEN).items()}
    tensors = {f"layer.{key}": value for key, value in parts.items() if "." not in key and key != "expected"}
    raw = {"quantization_config": quantized.LAYERS[name][0]}
    with SecondDevice() as gpu, created_as(torch.bfloat16, gpu.device):
        weight = with_dequantized(quantized.stored(tensors), raw, "here")["layer.weight"]
        assert isinstance(weight, QuantizedTensor)
        loaded = weight.load()
        held = [loaded.codes, loaded.scales, loaded.zeros] if isinstance(loaded, QuantizedWeight) else [loaded]
        assert not any(gpu.has(tensor) for tensor in (*held, weight.read()))


def test_mxfp4_is_read_to_the_host() -> None:
    blocks, scales = torch.randint(256, (4, 2, 16), dtype=torch.uint8), torch.full((4, 2), 124, dtype=torch.uint8)
    with SecondDevice() as gpu, created_as(torch.bfloat16, gpu.device):
        assert not gpu.has(mxfp4_weight(blocks, scales).dense())


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_a_weight_is_rounded_on_its_device(quantization: Any) -> None:
    with SecondDevice() as gpu:
        rounded = quantize(torch.randn(16, 64, device=gpu.device), quantization)
        assert elsewhere(rounded, gpu) == []


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_files_are_read_to_the_host(file: str, tmp_path: Path) -> None:
    dc.write(tmp_path, {"a": torch.ones(4, 3)}, {}, None if file.endswith("safetensors") else file)
    with SecondDevice() as gpu, created_as(torch.bfloat16, gpu.device):
        stored = open_weights(tmp_path)["a"]
        assert not gpu.has(stored.read())
        assert not gpu.has(stored.read_part((slice(1, 3),)))


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {  # of a tensor there and one on the host
    "sum": lambda there, host: there + host,
    "in place": lambda there, host: there.add_(host),
    "joined": lambda there, host: torch.cat([there, host]),
    "compared": torch.equal,
    "indices there": lambda there, host: host[there],
    "default device": lambda there, host: torch.arange(3) + host,
    "like": lambda there, host: torch.zeros_like(there) + host,
    "numpy": lambda there, host: there.numpy(),
}
ALLOWED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scalar": lambda there, host: there + host[0],
    "indices": lambda there, host: there[host],
    "copied": lambda there, host: there.copy_(host),
    "moved": lambda there, host: there + host.to(there.device),
    "as another": lambda there, host: there + host.to(there),
}


def test_the_stand_in_refuses_what_cuda_refuses() -> None:
    with SecondDevice() as gpu, gpu.device:
        there, host = torch.arange(3), torch.arange(3, device="cpu")
        for name, mix in MIXED.items():
            with pytest.raises((RuntimeError, TypeError), match="same device|cuda:0 device"):
                mix(there, host)
                pytest.fail(name)
        for name, allowed in ALLOWED.items():
            assert allowed(there, host).device == gpu.device, name
        assert there.cpu().numpy().tolist() == [0, 1, 2]
        assert not gpu.has(host)
