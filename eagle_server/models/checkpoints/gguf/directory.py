"""A directory that stands for a GGUF file: config.json, tokenizer and an index of the tensors, made once and kept.

So all that reads checkpoints reads these files, too. Files of the same names beside the GGUF file come before its own
metadata. The tensors stay where they are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from eagle_server.models.checkpoints.gguf.tensors import INDEX, Place, places
from eagle_server.models.config import CheckpointError
from eagle_server.ops.native.build import CACHE, check_owner, directories

_VERSION = "2"  # of what is kept
_BESIDE = ("*.json", "*.jinja", "tokenizer.model")
_ARCHITECTURES = {  # of llama.cpp: model_type and class
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_SCALINGS = ("linear", "yarn")
_GPT2 = ("gpt-2", "gpt2")  # names of its way to split texts
_ADVICE = "put the model's tokenizer.json beside the file, or name it: --tokenizer-path"

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})")  # of llama-gguf-split; the first part has the metadata

logger = logging.getLogger(__name__)


def directory_of(file: Path, *, tokenizer: bool = True) -> Path:
    """The directory that stands for a GGUF file, with its tokenizer or without.

    Raises:
        CheckpointError: the file is damaged, or its architecture or tokenizer is not supported.
        BuildError: what is kept might be another user's.
    """
    parts = _parts(file.resolve())
    file = parts[0]
    about = [(part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    beside = [each for pattern in _BESIDE for each in sorted(file.parent.glob(pattern))]
    times = [(each.name, each.stat().st_mtime_ns) for each in beside]
    key = hashlib.sha256(repr((_VERSION, str(file), about, times, tokenizer)).encode()).hexdigest()
    for base in directories(CACHE.with_name("gguf"), "gguf"):
        directory = base / f"{file.stem}-{key[:16]}"
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(base)
            if (directory / INDEX).is_file():
                return directory
            unfinished = Path(tempfile.mkdtemp(dir=base, prefix=".unfinished-"))
        except OSError:
            continue  # a cache that cannot be written
        try:
            _write(parts, unfinished, tokenizer=tokenizer and not (file.parent / "tokenizer.json").is_file())
            for each in beside:
                shutil.copyfile(each, unfinished / each.name)
            if not directory.is_dir():
                unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return directory
    raise CheckpointError(f"{file}: neither {CACHE.parent} nor the directory for temporary files can be written")


def _parts(file: Path) -> list[Path]:
    """The files that together are this one.

    Raises:
        CheckpointError: one is missing.
    """
    name = _PART.fullmatch(file.stem)
    if name is None:
        return [file]
    count = int(name[2])
    parts = [file.with_name(f"{name[1]}-{number:05d}-of-{name[2]}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(f"{file}: one of {count} parts, of which {', '.join(missing[:3])} is missing")
    return parts


def _opened(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except (ValueError, LookupError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable GGUF file ({error})") from None


def _found(file: Path, reader: GGUFReader, part: int) -> dict[str, Place]:
    """Where the tensors of one file are, by their names."""
    found = {}
    for tensor in reader.tensors:
        shape, offset, size = tensor.shape.tolist(), int(tensor.data_offset), int(tensor.n_bytes)
        place = Place(tensor.name, tensor.tensor_type.name, [int(size) for size in reversed(shape)], offset, size)
        if offset + size > file.stat().st_size:
            raise CheckpointError(f"{file}: ends before its tensors do; an incomplete download?")
        found[tensor.name] = place._replace(part=part)
    return found


def _write(parts: Sequence[Path], directory: Path, *, tokenizer: bool) -> None:
    file, readers = parts[0], [_opened(part) for part in parts]
    metadata = {name: _exact(field.contents()) for name, field in readers[0].fields.items() if not _is_long(field)}
    if metadata.get("split.count", 1) > len(parts):
        count = metadata["split.count"]
        raise CheckpointError(f"{file}: one of {count} parts; name it ...-00001-of-{count:05d}.gguf, as all parts")
    found: dict[str, Place] = {}
    for part, reader in enumerate(readers):
        found |= _found(parts[part], reader, part)
    every = (tensor for reader in readers for tensor in reader.tensors)
    factors = next((tensor.data.tolist() for tensor in every if tensor.name == "rope_freqs.weight"), None)
    config = _config(metadata, found, factors, str(file))
    pairs = {}
    if metadata["general.architecture"] == "llama":
        pairs = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    named = places(found, metadata["general.architecture"], pairs, str(file))
    ends = [int(metadata[key]) for key in _ENDS if key in metadata]
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if ends:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    if tokenizer:
        _write_tokenizer(file, directory, metadata)
    (directory / INDEX).write_text(
        json.dumps({"files": [str(part) for part in parts], "tensors": named}), encoding="utf-8"
    )


def _exact(value: Any) -> Any:
    """A number that was rounded to float32, as it was before: 1e-05 and not 9.999999747e-06."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _is_long(field: Any) -> bool:
    """Whether it is a list of tokens, merges or the like, which takes seconds to read."""
    return len(field.data) > 1024  # noqa: PLR2004


def _config(
    metadata: Mapping[str, Any], found: Mapping[str, Place], factors: list[float] | None, source: str
) -> dict[str, Any]:
    """config.json from the metadata."""
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"{source}: the architecture {kind} is not supported in GGUF; supported are {', '.join(_ARCHITECTURES)}"
        )

    def value(key: str, default: Any = None) -> Any:
        known = metadata.get(f"{kind}.{key}", default)
        if known is None:
            raise CheckpointError(f"{source}: {kind}.{key} is missing")
        return known

    model_type, architecture = _ARCHITECTURES[kind]
    if "token_embd.weight" not in found:
        raise CheckpointError(f"{source}: the tensor token_embd.weight is missing")
    vocab, hidden = found["token_embd.weight"].shape
    heads = value("attention.head_count")
    matrices = {place.type for place in found.values() if len(place.shape) > 1}
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", value("rope.dimension_count", hidden // heads)),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "output.weight" not in found,
        "attention_bias": "blk.0.attn_q.bias" in found,
        "eos_token_id": metadata.get(_ENDS[0]),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "float32" if matrices == {"F32"} else "bfloat16",
        "rope_parameters": _rope(metadata, kind, factors, value("context_length"), source),
    }
    if model_type == "qwen3_moe":
        config |= {
            "num_experts": value("expert_count"),
            "num_experts_per_tok": value("expert_used_count"),
            "moe_intermediate_size": value("expert_feed_forward_length"),
            "norm_topk_prob": True,  # as llama.cpp computes it; the file does not say
        }
    elif kind == "gemma3":
        config |= _gemma3(config, value)
    elif any("_exps" in name for name in found):
        raise CheckpointError(f"{source}: experts in the architecture {kind} are not supported in GGUF")
    return config


def _gemma3(config: Mapping[str, Any], value: Callable[..., Any]) -> dict[str, Any]:
    """Windows, their RoPE and scales. What files do not say is as in all of Google's models."""
    largest = 62  # layers of the model of 27 billion parameters, whose queries are scaled by the mean size of a head
    sizes = config["hidden_size"] // config["num_attention_heads"], config["head_dim"]
    pattern, layers = value("attention.sliding_window_pattern", 6), config["num_hidden_layers"]
    is_windowed = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in range(layers)]
    local = {"rope_type": "default", "rope_theta": float(value("rope.freq_base_swa", 1e4))}
    return {
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "sliding_window": value("attention.sliding_window"),
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in is_windowed],
        "query_pre_attn_scalar": sizes[0] if layers == largest else sizes[1],
        "final_logit_softcapping": value("final_logit_softcapping", 0.0),
    }


def _rope(
    metadata: Mapping[str, Any], kind: str, factors: list[float] | None, context: int, source: str
) -> dict[str, Any]:
    """Llama 3.1 stores what each wavelength is multiplied by, which is LongRoPE's `short_factor`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(metadata.get(f"{kind}.rope.freq_base", 1e4))}
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if factors is not None:
        if any(not math.isfinite(factor) or factor <= 0 for factor in factors):
            raise CheckpointError(f"{source}: rope_freqs.weight: positive numbers are expected")
        longrope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return rope | longrope | {"original_max_position_embeddings": context}
    if scaling == "none":
        return rope
    if scaling not in _SCALINGS:
        raise CheckpointError(f"{source}: {kind}.rope.scaling.type {scaling} is not supported in GGUF")
    original = metadata.get(f"{kind}.rope.scaling.original_context_length", context)
    factor = float(metadata.get(f"{kind}.rope.scaling.factor", 1.0))
    return rope | {"rope_type": scaling, "factor": factor, "original_max_position_embeddings": original}


def _write_tokenizer(file: Path, directory: Path, metadata: Mapping[str, Any]) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template, as transformers makes them from the metadata."""
    from transformers import AutoTokenizer  # seconds of import
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, split = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "gpt2" and split not in {*GGUF_PRE_TOKENIZER_SPLITS, *_GPT2}:  # transformers would take GPT-2's
        raise CheckpointError(f"{file}: how its tokenizer splits texts ({split}) is not known; {_ADVICE}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(directory)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file}: its tokenizer cannot be read ({reason}); {_ADVICE}") from None
