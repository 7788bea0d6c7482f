"""Quantized checkpoints: the numbers of the formats' own libraries, whole models, and clear errors.

`quantized.safetensors` holds small random weights as AutoGPTQ 0.7.1, AutoAWQ 0.2.9 and compressed-tensors 0.20.0 have
packed them, and as `expected` what the same library dequantizes them to.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from eagle_server.attention.dense import DenseCausal
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.quantized import with_dequantized
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.checkpoints.weights import QuantizedTensor, StoredTensor
from eagle_server.models.config import CheckpointError
from eagle_server.models.layers import Linear
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_server.ops.linear.quantize import QuantizedWeight
from eagle_server.ops.native.library import available
from tests.support.ranks import rank_groups

GOLDEN = Path(__file__).with_name("quantized.safetensors")
Tensors = dict[str, Tensor]


def compressed(bits: int, kind: str, strategy: str, **settings: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, **settings}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def gptq(bits: int, group: int) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "checkpoint_format": "gptq"}


# The config, and the format that native kernels take as it is.
LAYERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "pack_symmetric": (compressed(4, "int", "group", group_size=32), "int4"),
    "pack_asymmetric": (compressed(4, "int", "group", group_size=32), "int4"),
    "pack_channel": (compressed(4, "int", "channel"), "int4"),
    "pack_8": (compressed(8, "int", "channel"), "int8"),
    "int_channel": (compressed(8, "int", "channel"), "int8"),
    "int_asymmetric": (compressed(8, "int", "channel"), None),
    "int_group": (compressed(8, "int", "group", group_size=32), None),
    "float_channel": (compressed(8, "float", "channel"), "fp8"),
    "float_tensor": (compressed(8, "float", "tensor"), "fp8"),
    "float_block": (compressed(8, "float", "block", block_structure=[16, 32]), "fp8"),
    "gptq": (gptq(4, 32), "int4"),
    "gptq_act_order": (gptq(4, 16), None),
    "gptq_one_group": (gptq(4, -1), "int4"),
    "gptq_8": (gptq(8, 32), None),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, "int4"),
}


def stored(tensors: Tensors) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(Path("memory"), name, tuple(tensor.shape), partial(lambda own: own, tensor))
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_those_of_the_formats_own_library(name: str) -> None:
    config, native = LAYERS[name]
    parts = {key.removeprefix(f"{name}."): value for key, value in load_file(GOLDEN).items()}
    parts = {key: value for key, value in parts.items() if "." not in key}
    expected = parts.pop("expected")
    weights = with_dequantized(
        stored({f"layer.{part}": tensor for part, tensor in parts.items()}), {"quantization_config": config}, "here"
    )
    weight = weights.pop("layer.weight")
    assert isinstance(weight, QuantizedTensor) and not weights
    assert weight.shape == tuple(expected.shape)
    near = {"atol": 5e-4, "rtol": 1e-3} if name == "awq" else {"atol": 1e-7, "rtol": 1e-6}  # AutoAWQ rounds to float16
    torch.testing.assert_close(weight.read().float(), expected, **near)
    codes = weight.load()
    assert (codes.quantization if isinstance(codes, QuantizedWeight) else None) == native
    if isinstance(codes, QuantizedWeight):
        torch.testing.assert_close(codes.dense(), expected, **near)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
EXPERTS: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [0],
}


def words(codes: Tensor) -> Tensor:
    """4-bit codes [rows, n] -> int32 [rows, n / 8]."""
    shifts = torch.arange(0, 32, 4)
    packed = (codes.long().unflatten(1, (-1, 8)) << shifts).sum(2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in] with the zero 8, scales [out, groups of 32], and the weight that they are."""
    scales = weight.unflatten(1, (-1, 32)).abs().amax(2) / 7
    spread = scales.repeat_interleave(32, 1)
    codes = (weight / spread).round().clamp(-8, 7) + 8
    return codes, scales, (codes - 8) * spread


def as_gptq(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scales, dense = int4(weight)
    zeros = words(torch.full((scales.shape[1], weight.shape[0]), 7.0))
    parts = {
        "qweight": words(codes).t(),
        "qzeros": zeros,
        "scales": scales.t(),
        "g_idx": torch.arange(len(weight.t())) // 32,
    }
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}, dense


def as_packed(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scales, dense = int4(weight)
    shape = torch.tensor(weight.shape)
    return {f"{name}.weight_packed": words(codes), f"{name}.weight_scale": scales, f"{name}.weight_shape": shape}, dense


def as_int8(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    return {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scales}, codes * scales


def as_fp8(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = (-(-size // 32) for size in weight.shape)
    scales = 0.01 * (1 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)))
    spread = scales.repeat_interleave(32, 0)[: len(weight)].repeat_interleave(32, 1)[:, : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, codes.float() * spread


def as_fp8_by_rows(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes.float() * scales


FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], tuple[Tensors, Tensor]], str | None]] = {
    "GPTQ": (gptq(4, 32), as_gptq, "int4"),
    "compressed-tensors int4": (compressed(4, "int", "group", group_size=32), as_packed, "int4"),
    "compressed-tensors int8": (compressed(8, "int", "channel"), as_int8, "int8"),
    "FP8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, as_fp8, None),
    "compressed-tensors fp8": (compressed(8, "float", "channel"), as_fp8_by_rows, None),
}


def written(
    directory: Path,
    config: dict[str, Any],
    store: Callable[[str, Tensor], tuple[Tensors, Tensor]],
    base: dict[str, Any] = CONFIG,
) -> Tensors:
    """Write a random checkpoint with its layers quantized. Returns the dequantized tensors."""
    torch.manual_seed(0)
    model = TargetModel(read_target_config(base), 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    save_checkpoint(model, directory, base, torch.float32)
    dense, tensors = load_file(directory / "model.safetensors"), Tensors()
    for name, tensor in list(dense.items()):
        if name.endswith("_proj.weight"):
            parts, dense[name] = store(name.removesuffix(".weight"), tensor)
            tensors |= parts
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**base, "quantization_config": config}))
    return dense


def logits(model: Any) -> Tensor:
    return model.logits(model(torch.arange(9), torch.arange(9), DenseCausal(1)).hidden)


@pytest.mark.parametrize("base", [CONFIG, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_computes_with_its_dequantized_weights(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    config, store, native = FORMATS[name]
    dense = written(tmp_path / "quantized", config, store, base)
    (tmp_path / "dense").mkdir()
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "dense" / "config.json").write_text(json.dumps(base))
    expected = logits(load_target(tmp_path / "dense", Loading(progress=False, pack=False)))
    found = load_target(tmp_path / "quantized", Loading(progress=False, pack=False))
    torch.testing.assert_close(logits(found), expected, atol=1e-5, rtol=1e-5)
    if not available(torch.device("cpu"), torch.float32):
        return
    served = load_target(tmp_path / "quantized", Loading(progress=False))
    linears = [each for each in served.modules() if isinstance(each, Linear) and each.parts[0][0] != "lm_head"]
    kinds = {each.native[0]._kind for each in linears if each.native is not None}
    assert kinds == {{"int8": 3, "int4": 4, None: 0}[native]}
    torch.testing.assert_close(
        dict(served.weight_views())["model.layers.1.self_attn.k_proj.weight"],
        dense["model.layers.1.self_attn.k_proj.weight"],
    )
    error = (logits(served) - expected).norm() / expected.norm()
    assert error < (1e-5 if native is None else 0.03)  # inputs are rounded to 8 bits


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_of_transformers_computes_with_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    """transformers gets floats, whatever the packer, and native kernels the integers."""
    (config, store, native), case = FORMATS[name], {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
    torch.manual_seed(0)
    olmo = CONFIG_MAPPING["olmo2"](
        **case, num_hidden_layers=2, num_attention_heads=4, eos_token_id=0, pad_token_id=None
    )
    AutoModelForCausalLM.from_config(olmo).save_pretrained(tmp_path / "dense")
    dense, tensors = load_file(tmp_path / "dense" / "model.safetensors"), Tensors()
    for key, tensor in list(dense.items()):
        if key.endswith("_proj.weight"):
            parts, dense[key] = store(key.removesuffix(".weight"), tensor)
            tensors |= parts
        else:
            tensors[key] = tensor
    save_file(dense, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "quantized").mkdir()
    save_file(tensors, tmp_path / "quantized" / "model.safetensors")
    raw = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "quantized" / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")(torch.arange(9)[None]).logits[0]
    served = load_target(tmp_path / "quantized", Loading(progress=False))
    layer = served.model.model.layers[1].self_attn.k_proj  # type: ignore[attr-defined]
    torch.testing.assert_close(layer.dense_weight(), dense["model.layers.1.self_attn.k_proj.weight"])
    assert layer.native is None or layer.native[0].quantization == native
    error = (logits(served) - expected).norm() / expected.norm()
    assert error < (1e-5 if native is None or layer.native is None else 0.03)  # inputs are rounded to 8 bits


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_model_is_split_over_two_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG, "intermediate_size", 128)  # whole groups for both ranks
    config, store, _ = FORMATS[name]
    written(tmp_path, config, store)
    expected = logits(load_target(tmp_path, Loading(progress=False)))
    with rank_groups(2) as (first, threads, others):
        models = [load_target(tmp_path, Loading(progress=False), ranks=ranks) for ranks in (first, *others)]
        found, same = threads.map(logits, models)
    assert torch.equal(found, same)
    assert (found - expected).norm() / expected.norm() < 0.03  # inputs are rounded to 8 bits, half by half


def test_groups_that_do_not_divide_over_the_ranks_are_refused(tmp_path: Path) -> None:
    config, store, _ = FORMATS["GPTQ"]
    written(tmp_path, config, store)
    message = "down_proj.qweight: quantized in groups of 32 of its 96 inputs, which do not divide over --tp-size 2"
    with rank_groups(2) as (_, _, [second]), pytest.raises(CheckpointError, match=message):
        load_target(tmp_path, Loading(progress=False), ranks=second)


def test_blocks_of_fp8_that_do_not_divide_over_the_ranks_are_multiplied_out(tmp_path: Path) -> None:
    """The second of two ranks has the last 48 of 96 inputs, which begin within a block of 32."""
    config, store, _ = FORMATS["FP8"]
    written(tmp_path, config, store)
    expected = logits(load_target(tmp_path, Loading(progress=False)))
    with rank_groups(2) as (first, threads, others):
        models = [load_target(tmp_path, Loading(progress=False), ranks=ranks) for ranks in (first, *others)]
        found, _ = threads.map(logits, models)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def weight_of(parts: Tensors, config: dict[str, Any]) -> QuantizedTensor:
    weights = with_dequantized(
        stored({f"layer.{part}": tensor for part, tensor in parts.items()}), {"quantization_config": config}, "here"
    )
    weight = weights["layer.weight"]
    assert isinstance(weight, QuantizedTensor)
    return weight


def test_scales_of_blocks_are_told_from_scales_of_rows_by_their_shape() -> None:
    """[256, 1024] in blocks of [2, 512] has 256 scales, as many as rows."""
    codes = torch.randn(256, 1024).to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(128, 2)
    found = weight_of(
        {"weight": codes, "weight_scale_inv": scales}, {"quant_method": "fp8", "weight_block_size": [2, 512]}
    )
    assert torch.equal(found.read(), codes.float() * scales.repeat_interleave(2, 0).repeat_interleave(512, 1))


@pytest.mark.parametrize("scales", [(64, 1), (1,), ()], ids=["by row", "one", "scalar"])
def test_fp8_with_a_scale_for_each_row_or_one_for_all_is_kept_as_it_is(scales: tuple[int, ...]) -> None:
    codes, scale = torch.randn(64, 128).to(torch.float8_e4m3fn), 0.5 + torch.rand(scales)
    kind = "channel" if scales == (64, 1) else "tensor"
    weight = weight_of({"weight": codes, "weight_scale": scale}, compressed(8, "float", kind)).load()
    assert isinstance(weight, QuantizedWeight)
    assert (weight.quantization, weight.codes.dtype) == ("fp8", torch.float8_e4m3fn)
    assert weight.dense().equal(codes.float() * scale)
    stacked = QuantizedWeight.stacked([weight, weight])
    assert stacked.dense().equal(weight.dense().repeat(2, 1))


def test_weights_beside_scales_must_be_compressed() -> None:
    parts = {"weight": torch.randn(8, 64).bfloat16(), "weight_scale": torch.ones(8, 1)}
    with pytest.raises(CheckpointError, match="the weight is not compressed"):
        weight_of(parts, compressed(8, "int", "channel")).read()


def test_an_order_of_inputs_that_is_not_set_is_the_plain_one() -> None:
    codes, scales, dense = int4(torch.randn(16, 64))
    parts = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([16, 64])}
    found = weight_of({**parts, "weight_g_idx": torch.full((64,), -1)}, compressed(4, "int", "group", group_size=32))
    torch.testing.assert_close(found.read(), dense)


def test_a_tied_embedding_is_filled_though_the_head_over_it_is_packed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    raw = {**CONFIG, "tie_word_embeddings": True}
    save_checkpoint(TargetModel(read_target_config(raw), 64), tmp_path, raw, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    embed = torch.randn(40, 64)
    parts, dense = as_int8("model.embed_tokens", embed)
    del tensors["model.embed_tokens.weight"]
    save_file({**tensors, **parts}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": compressed(8, "int", "channel")}))
    model = load_target(tmp_path, Loading(progress=False))
    torch.testing.assert_close(model.embed.detach(), dense)
    torch.testing.assert_close(model.lm_head.dense_weight().detach(), dense)


def test_zero_biases_that_a_packer_has_added_are_ignored_and_others_are_not(tmp_path: Path) -> None:
    written(tmp_path, *FORMATS["GPTQ"][:2])
    tensors = load_file(tmp_path / "model.safetensors")
    expected = logits(load_target(tmp_path, Loading(progress=False)))
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits(load_target(tmp_path, Loading(progress=False))), expected)
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 0.1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected tensors: model.layers.0.mlp.up_proj.bias"):
        load_target(tmp_path, Loading(progress=False))


def drop(tensors: Tensors) -> None:
    del tensors["model.layers.0.mlp.up_proj.scales"]


def truncate(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.qzeros"
    tensors[name] = tensors[name][:1].clone()


def narrow(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.qweight"
    tensors[name] = tensors[name][:4].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "layers.0.mlp.up_proj.qweight: its scales is missing"),
        (truncate, "up_proj.qweight: the parts do not fit: qweight .8, 96., qzeros .1, 12."),
        (narrow, r"up_proj.qweight: expected shape \[96, 64\], found \[96, 32\]"),
    ],
)
def test_a_damaged_layer_is_named(change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    written(tmp_path, *FORMATS["GPTQ"][:2])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_target(tmp_path, Loading(progress=False))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "bitsandbytes is not supported; known are gptq, awq, compressed-tensors, fp8 and mxfp4",
        ),
        ({**gptq(4, 32), "bits": 3}, "gptq with 3 bits in groups of 32 is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's layout gemv is not supported, gemm is"),
        (compressed(4, "float", "group", group_size=16), "float weights of 4 bits are not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two positive integers are expected"),
        ({**gptq(4, 32), "group_size": 1e30}, "groups of 1e.30 is not supported"),
        ({**gptq(4, 32), "group_size": 10**30}, "is not supported"),
        (compressed(4, "int", "group"), "the strategy group needs a positive group_size, found None"),
        (compressed(4, "int", "group", group_size=True), "needs a positive group_size, found True"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups must be an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "config_groups: objects are expected"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}}, "weights must be an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": []}}}}, "not supported"),
    ],
)
def test_other_formats_are_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(tmp_path, config, as_int8)
    with pytest.raises(CheckpointError, match=message):
        load_target(tmp_path, Loading(progress=False))


@pytest.mark.parametrize("group", [8, 16, 48, 64, 128, None])
@pytest.mark.parametrize("name", ["AWQ", "GPTQ", "compressed-tensors int4"])
def test_groups_that_contradict_the_scales_are_refused(name: str, group: int | None, tmp_path: Path) -> None:
    """The scales are of groups of 32. Without a group_size, GPTQ and AWQ have groups of 128."""
    store = as_packed if name == "compressed-tensors int4" else as_gptq if name == "GPTQ" else as_awq
    config = {"quant_method": name.lower(), "bits": 4, **({} if group is None else {"group_size": group})}
    if name == "compressed-tensors int4":
        config = compressed(4, "int", "group", **({} if group is None else {"group_size": group}))

    def without_order(layer: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, dense = store(layer, weight)
        return {key: tensor for key, tensor in tensors.items() if not key.endswith("g_idx")}, dense

    written(tmp_path, config, without_order)
    with pytest.raises(CheckpointError, match="group_size"):
        load_target(tmp_path, Loading(progress=False))


def as_awq(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Any codes: only shapes matter here."""
    rows, columns = weight.shape
    groups = columns // 32
    parts = {
        "qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
        "qzeros": torch.zeros(groups, rows // 8, dtype=torch.int32),
        "scales": torch.ones(groups, rows),
    }
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, torch.zeros_like(weight)


@pytest.mark.parametrize("shape", [torch.tensor(64), torch.tensor([64.0, 96.0]), torch.tensor([[64, 96]])], ids=str)
def test_a_stored_shape_that_is_none_is_named(shape: Tensor, tmp_path: Path) -> None:
    written(tmp_path, *FORMATS["compressed-tensors int4"][:2])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.up_proj.weight_shape": shape}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_shape: two integers are expected"):
        load_target(tmp_path, Loading(progress=False))


VALUES: list[Any] = [None, True, 0, -1, 3, 7.5, 10**9, 10**30, 1e30, "x", [], [1], {}, {"a": 1}, {"weights": []}]


def damaged(value: Any, chance: random.Random) -> Any:
    """The same document with one value, at any depth, replaced, removed or moved."""
    if not isinstance(value, dict) or not value:
        return chance.choice(VALUES)
    key = chance.choice(list(value))
    rest = {name: each for name, each in value.items() if name != key}
    kind = chance.randrange(5)
    if kind == 0:
        return rest
    if kind == 1:
        return {**value, key: chance.choice(VALUES)}
    return {**value, key: damaged(value[key], chance)}


@pytest.mark.parametrize("name", [*FORMATS, "plain"])
def test_a_damaged_configuration_is_one_line(name: str, tmp_path: Path) -> None:
    """Random damages, on a machine that has no memory for a model of a billion rows."""
    config, store = FORMATS[name][:2] if name in FORMATS else ({}, lambda layer, w: ({f"{layer}.weight": w}, w))
    written(tmp_path, config, store)
    raw = json.loads((tmp_path / "config.json").read_text())
    outcomes = Counter[bool]()
    for seed in range(150):
        (tmp_path / "config.json").write_text(json.dumps(damaged(raw, random.Random(seed))))
        try:
            load_target(tmp_path, Loading(context=64, progress=False))
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert min(outcomes.values()) > 10 and len(outcomes) == 2
