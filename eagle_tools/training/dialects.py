"""EAGLE-3 heads as files for SGLang and for vLLM, whose format is that of speculators.

Both loaders skip tensors that they do not know, and leave those at random values that they do not find. So names and
shapes are checked before a head is written, and what was written is loaded again.

Aux layers stand in config.json twice: at the top level as boundaries (after b layers), as vLLM reads them, and in
`eagle_config` as layer outputs (b - 1), to which SGLang adds 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, flatten
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.recipes import DIALECTS, Dialect

_AUX = "eagle_aux_hidden_state_layer_ids"
_LAYER_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("max_position_embeddings", "sliding_window", "use_sliding_window", "layer_types", "attention_bias", "mlp_bias"),
    *("bos_token_id", "eos_token_id"),
)
_READERS: dict[Dialect, str] = {"sglang": "SGLang", "speculators": "vLLM"}
_DRAFTS = 3  # speculators' default number of drafts; a server's own option replaces it


class DialectError(ValueError):
    """A head that a format cannot hold. The message is one line."""


def expressible(head: Eagle3Head, target: TargetModel) -> Dialect | None:
    """The first dialect that can hold a head; None: none can."""
    return next((name for name in DIALECTS if not _problem(head, target, name)), None)


def write_eagle3(
    head: Eagle3Head,
    config_json: Mapping[str, Any],
    target: TargetModel,
    directory: Path,
    dialect: Dialect,
    dtype: torch.dtype = torch.bfloat16,
    verifier: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors, and load them again.

    config_json: the head's own, in whichever format. verifier: speculators' note about the target, {name_or_path,
    architectures}.

    Raises:
        DialectError: the dialect cannot hold the head, a tensor is not finite, or another head is loaded.
    """
    if problem := _problem(head, target, dialect):
        raise DialectError(f"{directory}: not written: {problem}")
    tensors = {name: _stored(name, value, dtype) for name, value in _tensors(head, target, dialect).items()}
    if broken := [name for name, value in tensors.items() if not value.isfinite().all()]:
        raise DialectError(f"{directory}: not written: {broken[0]} has values that are not finite")
    directory.mkdir(parents=True, exist_ok=True)
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors creates files that only the owner may read
    flat = flatten(DraftFiles(directory, config_json, {}))
    unnamed = {"name_or_path": None, "architectures": [target.config.architecture]}
    config = {**_config_json(head, flat, dialect, verifier or unnamed), "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _check_loaded(head, target, directory, dtype)


def expected_tensors(config: Eagle3Config, dialect: Dialect) -> dict[str, tuple[int, ...]]:
    """The names and shapes that the dialect's reader fills, of a head of these sizes."""
    layers, streams = config.layers, len(config.aux_boundaries)
    hidden, vocab = layers.hidden_size, layers.vocab_size
    queries, keys = (count * layers.head_dim for count in (layers.num_heads, layers.num_kv_heads))
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, streams * config.target_hidden_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    for index in range(1 if dialect == "sglang" else layers.num_layers):
        at, width = _layer_name(index, dialect), hidden * (1 if index else 2)
        norms = ("input_layernorm", "post_attention_layernorm", *(() if index else ("hidden_norm",)))
        found |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
        found |= {f"{at}self_attn.{name}_proj.weight": (keys, width) for name in ("k", "v")}
        found |= {f"{at}self_attn.q_proj.weight": (queries, width), f"{at}self_attn.o_proj.weight": (hidden, queries)}
        found |= {f"{at}mlp.{name}_proj.weight": (layers.intermediate_size, hidden) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (hidden, layers.intermediate_size)
    if config.feature_norm == "each":
        found |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(streams)}
    if dialect == "speculators":
        found["embed_tokens.weight"] = (vocab, hidden)
        if config.feature_norm == "concat":
            found["input_norm.weight"] = (streams * config.target_hidden_size,)
    if config.vocab_map:
        found |= {"d2t": (config.draft_vocab_size,), "t2d": (vocab,)}
    return found


def _layer_name(index: int, dialect: Dialect) -> str:
    return "midlayer." if dialect == "sglang" else f"layers.{index}."


def _tensors(head: Eagle3Head, target: TargetModel, dialect: Dialect) -> dict[str, Tensor]:
    """The head's tensors by the dialect's names, with the target's rows where it shares them."""
    found = dict(head.weight_views())
    if dialect == "speculators":
        found = {name.replace("midlayer.", "layers.0."): value for name, value in found.items()}
        found.setdefault("embed_tokens.weight", target.embed)
    if "lm_head.weight" not in found:
        found["lm_head.weight"] = target.lm_head.dense_weight()
    return {name: value.detach() for name, value in found.items()}


def _problem(head: Eagle3Head, target: TargetModel, dialect: Dialect) -> str:
    """Why a dialect's reader would not get this head; "": it would."""
    config, reader = head.eagle, _READERS[dialect]
    if not config.aux_boundaries:
        return "a head without aux hidden states has no place in this format"
    if dialect == "sglang" and config.norm_before_residual:
        return f"norm_before_residual is not read by {reader}"
    found = {name: tuple(value.shape) for name, value in _tensors(head, target, dialect).items()}
    expected = expected_tensors(config, dialect)
    for name in sorted(found.keys() | expected.keys()):
        if name not in expected:
            return f"{name} is not read by {reader}"
        if found.get(name) != expected[name]:
            return f"{name} should have the shape {list(expected[name])}, found {list(found.get(name, ()))}"
    return ""


def _stored(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`. An embedding that this would round stays as it is, so that it is the target's."""
    rounded = value.to("cpu", dtype if value.is_floating_point() else value.dtype)
    if name == "embed_tokens.weight" and not torch.equal(rounded.to(value.dtype), value.cpu()):
        rounded = value.cpu()
    return rounded.clone().contiguous()


def _config_json(
    head: Eagle3Head, flat: Mapping[str, Any], dialect: Dialect, verifier: Mapping[str, Any]
) -> dict[str, Any]:
    config = head.eagle
    layer = {key: flat[key] for key in _LAYER_KEYS if key in flat}
    layer |= {"num_hidden_layers": config.layers.num_layers, "vocab_size": config.layers.vocab_size}
    aux = {_AUX: [boundary - 1 for boundary in config.aux_boundaries], "use_aux_hidden_state": True}
    sizes = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        _AUX: list(config.aux_boundaries),
        "eagle_config": aux,
    }
    if dialect == "sglang":
        flags = {"fc_norm": config.feature_norm == "each", "norm_output": config.norm_output}
        written = {name: True for name, is_set in flags.items() if is_set}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            "tie_word_embeddings": False,
            **sizes,
            **written,
        }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        **sizes,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm == "concat",
        "fc_norm": config.feature_norm == "each",
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFTS}],
            "verifier": dict(verifier),
        },
    }


def _check_loaded(head: Eagle3Head, target: TargetModel, directory: Path, dtype: torch.dtype) -> None:
    """Compare the head with what our loader, which refuses unknown and missing tensors, makes of the files."""
    how = Loading(context=head.rope.cos.shape[0], progress=False, pack=False)
    loaded = load_draft(directory, target, how, algorithm="EAGLE3")
    assert isinstance(loaded, Eagle3Head)
    if _comparable(loaded.eagle) != _comparable(head.eagle):
        raise DialectError(f"{directory}: config.json describes another head than the one that was trained")
    before, after = (_tensors(each, target, "speculators") for each in (head, loaded))
    for name, value in before.items():
        rounded = value.to(dtype) if value.is_floating_point() else value
        if not torch.equal(rounded, after[name].to(rounded.dtype)):
            raise DialectError(f"{directory}: {name}: other values are loaded than were trained")


def _comparable(config: Eagle3Config) -> Eagle3Config:
    """The config without what is not the head's: what it copies from the target, and lists of special tokens."""
    layers = config.layers
    windows = layers.windows if any(layers.windows) else ()
    same = {"dtype": torch.float32, "architecture": "", "eos_token_ids": (), "bos_token_id": None}
    layers = replace(layers, windows=windows, tie_word_embeddings=False, **same)  # type: ignore[arg-type]
    return replace(config, layers=layers, own_embed=False, own_lm_head=False)
