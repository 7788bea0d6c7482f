"""The config of a target that transformers' code runs, and the reasons why some cannot be served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle_server.cache.pool import KVShape
from eagle_server.models.config import CHUNK_LIMIT, CheckpointError, ModelConfig, RopeConfig
from eagle_server.models.config_json import architecture_name, read_config, stored_dtype, token_ids
from eagle_server.models.wrappers import MEDIA, WRAPPERS

TESTED = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteSWAForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "Llama4ForCausalLM",
    "MinistralForCausalLM",
    "Ministral3ForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
)
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_CAUSAL = (None, False, "vision")  # "vision": between the tokens of one image alone
_LENGTH_DEPENDENT = ("dynamic", "longrope")  # RoPE types that change the rotation of all keys in long texts


def transformers_config(directory: Path) -> ModelConfig:
    """The config of an architecture without a family here, from transformers' reading of its config.json.

    Raises:
        CheckpointError: transformers needs foreign code for it, or it cannot be served.
    """
    raw, source = read_config(directory), str(directory / "config.json")
    theirs = read_theirs(directory)
    architecture = _architecture(theirs, raw)
    try:
        reason = _reason_against(theirs, architecture)
        if reason is None:
            return _config(theirs, raw, architecture)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: one value per layer
        reason = " ".join(str(error).split())[:200]
    raise CheckpointError(f"{source}: architecture {architecture!r} cannot be served: {reason}")


def _architecture(config: Any, raw: Mapping[str, Any]) -> str:
    """The name of the class; of a decoder in a wrapper, which names none, that of its model_type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) if MEDIA in raw else architecture_name(raw))


def _config(config: Any, raw: Mapping[str, Any], architecture: str) -> ModelConfig:
    varies = hasattr(config, "num_kv_shared_layers")  # Gemma 4
    layer = config.per_layer_config[0] if varies else config
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    rope, limit = _context_limit(config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(config.vocab_size),
        hidden_size=hidden,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(getattr(layer, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(layer, "head_dim", None) or hidden // heads),
        states=_states(config) if varies else (),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        rope=rope,
        max_position=limit[0],
        context_limit=limit,
        dtype=stored_dtype(raw),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=token_ids({"eos_token_id": getattr(config, "eos_token_id", None)}, "config.json"),
        bos_token_id=getattr(config, "bos_token_id", None),
        has_family=False,
        media_token_ids=tuple(raw[MEDIA]) if MEDIA in raw else None,
    )


def _states(config: Any) -> tuple[tuple[KVShape, ...], ...]:
    """What layers keep; the last `num_kv_shared_layers` write no KV. Before the survey, for an estimate."""
    writing = int(config.num_hidden_layers - config.num_kv_shared_layers)
    layers = [config.per_layer_config[layer] for layer in range(writing)]
    kept = [(KVShape(layer.num_key_value_heads, layer.head_dim),) for layer in layers]
    return (*kept, *[()] * int(config.num_kv_shared_layers))


def _context_limit(config: Any) -> tuple[RopeConfig, tuple[int, str]]:
    """What extends the context, and the limit with its reason. Models with one RoPE per layer type are not extended:
    only some layers are scaled, and max_position_embeddings is the scaled length (Gemma 3).
    """
    declared = int(getattr(config, "max_position_embeddings", None) or 2048)
    if declared < 0:
        raise ValueError(f"max_position_embeddings must be a positive integer, found {declared}")
    chunk = getattr(config, "longest_chunk", declared)
    if chunk < declared:
        return RopeConfig(), (chunk, CHUNK_LIMIT)
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = str(parameters.get("rope_type", "default"))
    if kind in _LENGTH_DEPENDENT:
        return RopeConfig(), (declared, f"max_position_embeddings, as rope type {kind!r} depends on the length")
    if kind == "default" and "rope_type" not in parameters:  # no RoPE, or one per layer type
        return RopeConfig(), (declared, "max_position_embeddings")
    original = int(parameters.get("original_max_position_embeddings") or declared)
    factor = parameters.get("factor") or declared / original
    rope = RopeConfig(kind=kind, factor=float(factor), original_max_position=original)
    return rope, rope.context_limit(declared)


def read_theirs(directory: Path) -> Any:
    """transformers' config object of a checkpoint directory. Code in the directory is never run.

    Raises:
        CheckpointError: transformers cannot read it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig  # seconds of import that targets of a family never need

    raw = read_config(directory)
    try:
        if MEDIA in raw:
            config = AutoConfig.for_model(**{key: value for key, value in raw.items() if key != MEDIA})
        else:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, ArithmeticError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{directory / 'config.json'}: architecture {architecture_name(raw)!r} is not supported "
            f"here, and transformers cannot read it without foreign code ({reason})"
        ) from None
    _limit_to_chunk(config)
    return config


def _limit_to_chunk(config: Any) -> None:
    """Attention in chunks is full attention within the first chunk, and the config then says so (Llama 4).

    Queries grow from position `floor_scale` - 1 on. transformers counts a forward's rows for it, and ours are those of
    many requests.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is None:
        return
    grows = getattr(config, "attn_temperature_tuning", False)
    config.longest_chunk = min(int(chunk), int(config.floor_scale) - 1) if grows else int(chunk)
    config.attention_chunk_size, config.attn_temperature_tuning = None, False
    config.layer_types = ["full_attention" if kind == "chunked_attention" else kind for kind in config.layer_types]


def check_rope(config: Any, context: int, source: str) -> None:
    """Refuse a context length at which RoPE would change the rotation of earlier keys. Paged KV cannot change them.

    Raises:
        CheckpointError: the message has the context length that can be served.
    """
    for rope in _ropes(getattr(config, "rope_parameters", None) or {}):
        kind, original = rope.get("rope_type"), int(config.max_position_embeddings)
        if kind != "dynamic":  # in transformers, dynamic RoPE knows max_position_embeddings alone
            original = int(rope.get("original_max_position_embeddings") or original)
        if kind in _LENGTH_DEPENDENT and context > original:
            raise CheckpointError(
                f"{source}: rope type {kind!r} depends on how long a text is beyond {original} tokens; "
                f"add --context-length {original}"
            )


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer by config.json: 0 for none, None if config.json does not tell."""
    window = int(getattr(config, "sliding_window", None) or 0)
    if kinds := getattr(config, "layer_types", None):
        return window if kinds[layer] == "sliding_attention" else 0
    return None if window else 0


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters: one set, or one for each layer type."""
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (each for each in parameters.values() if isinstance(each, Mapping))


def _reason_against(config: Any, architecture: str) -> str | None:
    """The first reason in the config why the architecture cannot be served; None if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    reasons = {
        "it is an encoder and a decoder, and only decoders are served": config.is_encoder_decoder,
        f"it reads more than text; the text of {', '.join(WRAPPERS)} is served": config.get_text_config() is not config,
        "transformers knows it as no causal language model": architecture
        not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        f"its layers keep more than keys and values ({', '.join(kinds)})": kinds,
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", None) not in _CAUSAL,
        "its attention has an ALiBi bias": getattr(config, "alibi", False),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
