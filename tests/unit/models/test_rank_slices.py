"""A target that is split over ranks has the logits of the whole one, and each rank reads its slices only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.models import layers
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.rank_slices import own_slices, split_over
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.checkpoints.weights import QuantizedTensor, StoredTensor
from eagle_server.models.config import CheckpointError, Split
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_server.ops.linear.blocks import BlockWeight
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight
from tests.support.block_rows import random_rows
from tests.support.deepseek import DEEPSEEK
from tests.support.ranks import rank_groups
from tests.unit.models.test_load_target import CONFIG as LLAMA

CONFIG = {**LLAMA, "head_dim": 8}
TOKENS = torch.tensor([3, 39, 0, 20, 19, 7])


def checkpoint(directory: Path, settings: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    raw = {**(DEEPSEEK if "DeepseekV3ForCausalLM" in settings.get("architectures", ()) else CONFIG), **settings}
    model = TargetModel(read_target_config(raw), 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    save_checkpoint(model, directory, raw, torch.float32)
    return directory


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        causal = torch.full((len(TOKENS), len(TOKENS)), -torch.inf).triu(1)  # sliding windows are longer than TOKENS
        output = model(TOKENS, torch.arange(len(TOKENS)), DenseCausal(1, causal))
        return model.logits(output.hidden)  # type: ignore[no-any-return]


def split_logits(
    directory: Path, size: int, quantization: Quantization | None = None, **settings: Any
) -> tuple[list[Tensor], list[Any]]:
    """Every rank's logits, and the ranks' models."""
    with rank_groups(size) as (first, threads, others):
        how, given = Loading(progress=False, quantization=quantization), {"dtype": "float32", **settings}
        models = [load_target(directory, how, ranks=ranks, **given) for ranks in (first, *others)]
        return list(threads.map(logits, models)), models


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GLM = {"n_shared_experts": 1, "attention_bias": True, "use_qk_norm": True}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention"] * 2,
}
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
NEXT = {
    **{**HYBRID, "architectures": ["Qwen3NextForCausalLM"], **_EXPERTS},
    **{"num_experts": 4, "shared_expert_intermediate_size": 48},
}
DEEPSEEK_NAMES = {"architectures": ["DeepseekV3ForCausalLM"]}
STEP = {
    **{"architectures": ["Step3p5ForCausalLM"], **_EXPERTS, "n_routed_experts": 4, "share_expert_dim": 48},
    **{"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9, "num_sliding_attention_heads": 6},
    **{"mlp_layer_types": ["dense", "sparse"], "swiglu_limits": [0, 0.2], "swiglu_limits_shared": [0.2, 0.1]},
}
CASES: dict[str, tuple[dict[str, Any], int, Sequence[int]]] = {  # config, ranks, heads and KV heads of a rank
    "llama": ({}, 2, (2, 1)),
    "four ranks share two KV heads": ({}, 4, (1, 1)),
    "heads that do not divide": ({"num_attention_heads": 3, "num_key_value_heads": 3}, 2, (3, 3)),
    "KV heads that do not divide": ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, (6, 3)),
    "a width that does not divide": ({"intermediate_size": 47}, 2, (2, 1)),
    "a vocabulary that does not divide": ({"vocab_size": 41}, 2, (2, 1)),
    "a vocabulary whose last rank is all padding": ({"vocab_size": 41}, 8, (4, 2)),
    "tied embedding": ({"tie_word_embeddings": True}, 2, (2, 1)),
    "biases": ({"attention_bias": True, "mlp_bias": True}, 2, (2, 1)),
    "qwen2": ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, 2, (2, 1)),
    "qwen3": ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, 2, (2, 1)),
    "qwen3-moe": ({"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS, "num_experts": 4}, 2, (2, 1)),
    "glm4-moe": ({"architectures": ["Glm4MoeForCausalLM"], **_EXPERTS, "n_routed_experts": 4, **_GLM}, 2, (2, 1)),
    "deepseek": (DEEPSEEK_NAMES, 2, (2, 2)),
    "deepseek with biases": ({**DEEPSEEK_NAMES, "attention_bias": True, "q_lora_rank": None}, 4, (1, 1)),
    "deepseek with three heads": ({**DEEPSEEK_NAMES, "num_attention_heads": 3, "num_key_value_heads": 3}, 2, (3, 3)),
    "gpt-oss": (GPT_OSS, 2, (2, 1)),
    "gpt-oss, four ranks": (GPT_OSS, 4, (1, 1)),
    "qwen3.5": (HYBRID, 2, (2, 1)),
    "qwen3-next": (NEXT, 2, (2, 1)),
    "two key heads on four ranks": (NEXT, 4, (1, 1)),
    "step3p5, layers with other heads": (STEP, 2, (2, 1)),
    "step3p5, heads of some layers that do not divide": (STEP, 4, (4, 2)),
    "experts that do not divide": ({**DEEPSEEK_NAMES, "moe_intermediate_size": 31}, 2, (2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_logits_of_the_whole_target(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    settings, size, heads = CASES[name]
    directory = checkpoint(tmp_path / "target", settings)
    whole = load_target(directory, Loading(progress=False), dtype="float32")
    found, models = split_logits(directory, size)
    assert all((model.config.num_heads, model.config.num_kv_heads) == tuple(heads) for model in models)
    assert len(models[0].embed) == -(-whole.config.vocab_size // size)
    for each in found:
        torch.testing.assert_close(each, logits(whole), atol=2e-5, rtol=1e-5)
        assert torch.equal(each, found[0]), "ranks have the same bits"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_are_split(tmp_path: Path, quantization: str) -> None:
    torch.set_num_threads(1)
    directory = checkpoint(tmp_path / "target", {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
    whole = load_target(directory, Loading(progress=False, quantization=quantization), dtype="float32")
    found, _ = split_logits(directory, 2, quantization=quantization)
    exact = logits(load_target(directory, Loading(progress=False), dtype="float32"))
    error = (logits(whole) - exact).std()
    assert (found[0] - exact).std() < 1.5 * error


def test_a_bfloat16_target_is_split(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "target", {})
    found, _ = split_logits(directory, 2, dtype="bfloat16")
    whole = logits(load_target(directory, Loading(progress=False), dtype="bfloat16"))
    torch.testing.assert_close(found[0], whole, atol=0.05, rtol=0.05)
    assert torch.equal(*found)


def test_only_slices_are_read(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "target", {})
    config = read_target_config(CONFIG)

    def refuse() -> Tensor:
        raise AssertionError("the whole tensor is read")

    shapes = {"model.layers.0.self_attn.o_proj.weight": (32, 32), "model.layers.1.mlp.up_proj.weight": (48, 32)}
    read: list[tuple[slice, ...]] = []

    def part(index: tuple[slice, ...]) -> Tensor:
        read.append(index)
        return torch.zeros(48, 32)[index]

    with rank_groups(2) as (_, _, [second]):
        split = split_over(config, second).split
        assert split is not None
        stored = {name: StoredTensor(directory, name, shape, refuse, part) for name, shape in shapes.items()}
        own = own_slices(stored, config, split)
    assert [own[name].shape for name in shapes] == [(32, 16), (24, 32)]
    for name in shapes:
        own[name].read()
    assert read == [(slice(None), slice(16, 32)), (slice(24, 48),)]


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "target", {})
    with pytest.raises(CheckpointError, match="--tp-size 2: not supported, as --quantization-cache keeps whole"):
        split_logits(directory, 2, quantization="int8", quantization_cache=tmp_path)


def test_a_quantized_vocabulary_that_does_not_divide_ends_with_zeros() -> None:
    ranks = SimpleNamespace(rank=1, size=2)
    of_130, zeros = torch.full((5, 32), 130, dtype=torch.uint8), torch.full((1, 5), 128, dtype=torch.uint8)
    codes = QuantizedWeight("int8", of_130, torch.ones(1, 5), zeros, 32)
    stored = QuantizedTensor(Path("f"), "lm_head.weight", (5, 32), codes.dense, load=lambda: codes)
    split = Split(ranks, attention=True, mlp=True, experts=True)  # type: ignore[arg-type]
    [own] = own_slices({"lm_head.weight": stored}, read_target_config(CONFIG), split).values()
    assert isinstance(own, QuantizedTensor)
    loaded = own.load()
    assert isinstance(loaded, Tensor)
    assert loaded.shape == own.shape == (3, 32)
    assert loaded.equal(torch.cat([torch.full((2, 32), 2.0), torch.zeros(1, 32)]))


def test_each_rank_has_its_heads_of_q_k_and_v_in_a_quantized_projection() -> None:
    ranks, config = SimpleNamespace(rank=1, size=2), read_target_config({**CONFIG, **HYBRID})
    rows = torch.arange(64, dtype=torch.uint8)  # q and k: two heads of 6; v: four heads of 10
    ones, zeros = torch.ones(1, 64), torch.zeros(1, 64, dtype=torch.uint8)
    codes = QuantizedWeight("int8", rows[:, None].repeat(1, 32), ones, zeros, 32)
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    stored = QuantizedTensor(Path("f"), name, (64, 32), codes.dense, load=lambda: codes)
    split = Split(ranks, attention=True, mlp=True, experts=True, recurrent=True)  # type: ignore[arg-type]
    [own] = own_slices({name: stored}, config, split).values()
    assert isinstance(own, QuantizedTensor)
    loaded = own.load()
    assert isinstance(loaded, QuantizedWeight)
    expected = [*range(6, 12), *range(18, 24), *range(44, 64)]
    assert loaded.codes[:, 0].tolist() == own.read()[:, 0].tolist() == expected
    assert own.shape == (32, 32)


@pytest.mark.parametrize(("part", "dim"), [("self_attn.q_proj", 0), ("self_attn.o_proj", 1)])
@pytest.mark.parametrize("blocks", [2, 3])  # of a row; three do not divide
def test_blocks_of_a_gguf_file_are_cut_between_blocks_or_multiplied_out(blocks: int, part: str, dim: int) -> None:
    weight = BlockWeight((random_rows("Q8_0", 64, 32 * blocks),))
    name, ranks = f"model.layers.0.{part}.weight", SimpleNamespace(rank=1, size=2)
    stored = QuantizedTensor(Path("f"), name, weight.shape, weight.dense, load=lambda: weight)
    split = Split(ranks, attention=True, mlp=True, experts=True)  # type: ignore[arg-type]
    [own] = own_slices({name: stored}, read_target_config(CONFIG), split).values()
    assert isinstance(own, QuantizedTensor)
    loaded = own.load()
    assert isinstance(loaded, BlockWeight) == (dim == 0 or blocks == 2)
    dense = loaded if isinstance(loaded, Tensor) else loaded.dense()
    assert torch.equal(dense, weight.dense().chunk(2, dim)[1])
    assert dense.shape == own.shape


def test_attention_sums_over_the_ranks_once() -> None:
    summed = list[Tensor]()
    ranks = SimpleNamespace(rank=0, size=2, sum=lambda x: summed.append(x) or x)
    attention = layers.Attention(split_over(read_target_config(CONFIG), ranks), 0, 32)  # type: ignore[arg-type]
    bound = SimpleNamespace(rotate_and_attend=lambda qkv, heads, *_: qkv[:, :heads])
    with torch.no_grad():
        attention(torch.randn(3, 32), object(), bound)
    assert len(summed) == 1
