"""Checkpoints of models that read images, video or audio: their text decoder is an ordinary family, and it is served.

config.json nests the decoder's config as `text_config` (InternVL's own files: `llm_config`; older Qwen files: beside
the other keys). M-RoPE gives text three equal positions, which is plain RoPE. The tensors of encoders and projectors
are never read.

Source: the config classes and weight conversions of transformers 5, and the published files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

MEDIA = "media_token_ids"  # key of a promoted config: the tokens that stand for images, video and audio

_MEDIA_KEY = re.compile(r"(?:image|video|audio|vision_start|vision_end|boi|eoi|boa|eoa)_token_(?:id|index)")
_OUTER = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id")  # where the decoder has none
_DECODER = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
_ALIASES = ("kimi_k2",)  # model types of published files that transformers has under another name
_MROPE = ("mrope_section", "mrope_interleaved")


Order = Literal["in, out", "out, in"]  # of the sides of a weight in a file


@dataclass(frozen=True)
class ModelWrapper:
    """A model_type with a decoder inside.

    decoders: the families that may be inside. The first is what `text_config` means by a name that only wrappers have.
    towers: what the names of all other tensors begin with, perhaps after `model.`.
    defaults: keys that files may leave out, where the decoder's own family has other defaults.
    experts: how each layer's experts are stored in one tensor; None: in one tensor each.
    """

    decoders: tuple[str, ...]
    towers: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    experts: Order | None = None


_LLAVA = ("vision_tower.", "multi_modal_projector.")
_QWEN = ("visual.",)
_IDEFICS = ("vision_model.", "connector.")
_INTERNVL = ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss")
_LLAVA_NEXT = ModelWrapper(("llama", "mistral", "qwen2"), (*_LLAVA, "image_newline"))
WRAPPERS: Mapping[str, ModelWrapper] = {
    "exaone4_5": ModelWrapper(("exaone4",), _QWEN),
    "gemma3": ModelWrapper(("gemma3_text",), _LLAVA),
    "gemma4": ModelWrapper(("gemma4_text",), ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")),
    "glm4v_moe": ModelWrapper(("glm4_moe",), _QWEN),
    "idefics3": ModelWrapper(("llama",), _IDEFICS),
    "internvl": ModelWrapper(_INTERNVL, _LLAVA),
    "internvl_chat": ModelWrapper(_INTERNVL, ("vision_model.", "mlp1.")),
    "kimi_k25": ModelWrapper(("deepseek_v3",), ("vision_tower.", "mm_projector.")),
    "lfm2_vl": ModelWrapper(("lfm2",), _LLAVA),
    "llama4": ModelWrapper(("llama4_text",), ("vision_model.", "multi_modal_projector.")),
    "llava": ModelWrapper(("llama", "mistral", "qwen2", "qwen3"), _LLAVA),
    "llava_next": _LLAVA_NEXT,
    "llava_next_video": _LLAVA_NEXT,
    "llava_onevision": replace(_LLAVA_NEXT, decoders=("qwen2",)),
    "minicpmv4_6": ModelWrapper(("qwen3_5_text",), ("vision_tower.", "merger.")),
    "mistral3": ModelWrapper(("mistral", "ministral3"), _LLAVA),
    "qwen2_vl": ModelWrapper(("qwen2",), _QWEN, {"rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    "qwen2_5_vl": ModelWrapper(("qwen2",), _QWEN, {"rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    "qwen3_vl": ModelWrapper(("qwen3",), _QWEN, {"rope_theta": 5e5, "head_dim": 128}),
    "qwen3_vl_moe": ModelWrapper(("qwen3_moe",), _QWEN, {"rope_theta": 5e5, "norm_topk_prob": True}, experts="in, out"),
    "qwen3_5": ModelWrapper(("qwen3_5_text",), _QWEN),
    "qwen3_5_moe": ModelWrapper(("qwen3_5_moe_text",), _QWEN, experts="out, in"),
    "smolvlm": ModelWrapper(("llama",), _IDEFICS),
    "step3p7": ModelWrapper(("step3p5",), ("vision_model.", "vit_large_projector.")),
}


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as that of its text decoder alone. It names no architecture: `model_type` says the family."""
    wrapper = wrapper_of(raw)
    if wrapper is None:
        return dict(raw)
    nested = raw.get("text_config", raw.get("llm_config"))
    text = dict(nested) if isinstance(nested, Mapping) else {k: v for k, v in raw.items() if not isinstance(v, Mapping)}
    if not isinstance(nested, Mapping):
        text |= {key: raw[key] for key in ("rope_scaling", "rope_parameters") if key in raw}
    outer = {**wrapper.defaults, **{key: raw[key] for key in _OUTER if raw.get(key) is not None}}
    text = outer | {key: value for key, value in text.items() if value is not None or key not in outer}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), Mapping):
            text[key] = plain_rope(text[key])
    ties = [each["tie_word_embeddings"] for each in (raw, text) if each.get("tie_word_embeddings") is not None]
    if ties:  # older files have it in either place
        text["tie_word_embeddings"] = any(ties)
    for key in ("architectures", "auto_map"):
        text.pop(key, None)
    kind, outside = text.get("model_type"), str(raw["model_type"])
    text["model_type"] = wrapper.decoders[0] if kind in (None, outside, f"{outside}_text", *_ALIASES) else kind
    text[MEDIA] = sorted({v for k, v in raw.items() if _MEDIA_KEY.fullmatch(k) and type(v) is int})
    return text


def wrapper_of(raw: Mapping[str, Any]) -> ModelWrapper | None:
    """The wrapper that a config.json is of; None: it is of no known one."""
    nested = raw.get("text_config"), raw.get("vision_config")
    return WRAPPERS.get(str(raw.get("model_type"))) if any(isinstance(each, Mapping) for each in nested) else None


def plain_rope(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters for text: without the sections of M-RoPE."""
    plain = {key: value for key, value in scaling.items() if key not in _MROPE}
    return plain | {key: "default" for key in ("type", "rope_type") if plain.get(key) == "mrope"}


def text_name(wrapper: ModelWrapper, name: str) -> str | None:
    """The name of a tensor as the decoder's family has it; None: it is of an encoder or a projector."""
    if name.removeprefix("model.").startswith(wrapper.towers):
        return None
    for prefix, plain in _DECODER.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
