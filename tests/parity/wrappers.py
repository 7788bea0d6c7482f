"""Small random checkpoints of models that read images too, written by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.support.engines import CONTEXT
from tests.support.step3p5 import SETTINGS as STEP

VOCAB = 131
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN2 = {"depth": 1, "num_heads": 2, "patch_size": 14}
_QWEN3 = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_WINDOWED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_QWEN3_5 = {
    **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "rope_parameters": {
        **_MROPE,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
_QWEN3_5_VISION = {key: size for key, size in _QWEN3.items() if key != "deepstack_visual_indexes"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MEDIA = {"image_token_id": 125, "video_token_id": 126, "vision_start_token_id": 127, "vision_end_token_id": 128}


@dataclass(frozen=True)
class Case:
    """A model_type of transformers, its text and vision config, and other keys. has_family: it runs as one of ours."""

    model_type: str
    text: dict[str, Any]
    vision: dict[str, Any]
    has_family: bool = True
    media: dict[str, int] = field(default_factory=lambda: MEDIA)


_INDEX, _ID = {"image_token_index": 125}, {"image_token_id": 125}
_CLIP = {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16}
_GLM4_MOE = {
    **{"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "attention_bias": True},
    "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
}
_MISTRAL_MEDIA = {"image_token_index": 125}
_PIXTRAL = {**_SIGLIP, "model_type": "pixtral", "head_dim": 8}
_GEMMA_MEDIA = {"image_token_index": 125, "boi_token_index": 126, "eoi_token_index": 127}
_GEMMA4_MEDIA = {
    **{"image_token_id": 125, "boi_token_id": 126, "eoi_token_id": 127, "video_token_id": 128},
    **{"audio_token_id": 129, "boa_token_id": 130, "eoa_token_index": 124},
}
CASES = {
    "gemma3": Case(
        "gemma3",
        {**_WINDOWED, "head_dim": 32, "query_pre_attn_scalar": 20},
        {**_SIGLIP, "model_type": "siglip_vision_model"},
        media=_GEMMA_MEDIA,
    ),
    "gemma4": Case(
        "gemma4",
        {
            **{"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 7},
            **{"head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "pad_token_id": 0},
        },
        {**_SIGLIP, "num_key_value_heads": 2, "head_dim": 8},
        media=_GEMMA4_MEDIA,
    ),
    "mistral-small": Case("mistral3", {"model_type": "mistral", "head_dim": 32}, _PIXTRAL, media=_MISTRAL_MEDIA),
    "ministral3": Case(
        "mistral3",
        {"model_type": "ministral3", "head_dim": 16},
        _PIXTRAL,
        has_family=False,
        media=_MISTRAL_MEDIA,
    ),
    "qwen2-vl": Case("qwen2_vl", {"rope_parameters": _MROPE}, {**_QWEN2, "embed_dim": 16, "hidden_size": 64}),
    "qwen2.5-vl": Case(
        "qwen2_5_vl",
        {"rope_parameters": _MROPE},
        {**_QWEN2, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
    "qwen3-vl": Case("qwen3_vl", {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}, _QWEN3),
    "qwen3-vl-moe": Case(
        "qwen3_vl_moe",
        {**_EXPERTS, "head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        _QWEN3,
    ),
    "qwen3.5": Case("qwen3_5", _QWEN3_5, _QWEN3_5_VISION),
    "qwen3.5-moe": Case(
        "qwen3_5_moe", {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 48}, _QWEN3_5_VISION
    ),
    "lfm2-vl": Case(
        "lfm2_vl",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
        {**_SIGLIP, "num_patches": 16},
        media={"image_token_id": 125},
    ),
    "step3.7": Case(
        "step3p7",
        {**STEP, "num_hidden_layers": 4, "pad_token_id": 1},
        {**_SIGLIP, "num_attention_heads": 2, "mlp_ratio": 1.0},
        media={"image_token_id": 125},
    ),
    "llava": Case("llava", {"model_type": "llama"}, _CLIP, media=_INDEX),
    "llava-next": Case("llava_next", {"model_type": "mistral", "head_dim": 32}, _CLIP, media=_INDEX),
    "llava-onevision": Case(
        "llava_onevision",
        {"model_type": "qwen2"},
        {**_SIGLIP, "model_type": "siglip_vision_model"},
        media={**_INDEX, "video_token_index": 126},
    ),
    "internvl": Case("internvl", {"model_type": "qwen3", "head_dim": 16}, _SIGLIP, media=_ID),
    "idefics3": Case("idefics3", {"model_type": "llama"}, _SIGLIP, media=_ID),
    "smolvlm": Case("smolvlm", {"model_type": "llama"}, _SIGLIP, media=_ID),
    "glm-4.5v": Case(
        "glm4v_moe",
        _GLM4_MOE,
        {**_SIGLIP, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        media={"image_token_id": 125, "video_token_id": 126},
    ),
    "exaone4.5": Case(
        "exaone4_5",
        {"model_type": "exaone4_5_text", **_WINDOWED},
        {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64},
        has_family=False,
        media={"image_token_id": 125, "video_token_id": 126},
    ),
    "minicpm-v4.6": Case("minicpmv4_6", _QWEN3_5, _SIGLIP, media={"image_token_id": 125, "video_token_id": 126}),
    "llama4": Case(
        "llama4",
        {"intermediate_size_mlp": 80, "head_dim": 16, "num_local_experts": 4, "no_rope_layers": [1, 0, 1]},
        {**_SIGLIP, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        has_family=False,
        media=_GEMMA_MEDIA,
    ),
    "kimi-k2.5": Case(
        "kimi_k25",
        _DEEPSEEK,
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
}


def write(case: Case, directory: Path, **text: Any) -> PreTrainedModel:
    """Save the case's checkpoint in float32 and return transformers' model of it, which reads images too."""
    torch.manual_seed(0)
    keys = {"text_config": {**_TEXT, **case.text, **text}, "vision_config": case.vision, **case.media}
    config = AutoConfig.for_model(case.model_type, **keys)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.15)
            parameter.normal_(mean, spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.tie_weights()
    model.eval().save_pretrained(directory)
    if case.model_type == "kimi_k25":  # transformers 5.24 writes the decoder's layers as "blocks" and cannot read them
        rename(directory, lambda name: name.replace("language_model.model.blocks", "language_model.model.layers"))
    if case.model_type == "llama4":  # transformers 5.24 cannot run the whole model without an image
        return model.language_model  # type: ignore[no-any-return]
    return model


def rename(directory: Path, name: Callable[[str], str]) -> None:
    """Give the tensors of a checkpoint other names."""
    file = directory / "model.safetensors"
    save_file({name(key): tensor for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
