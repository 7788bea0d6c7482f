"""A draft checkpoint by canonical names, whichever trainer wrote it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_server.models.checkpoints.weights import Weights
from eagle_server.models.config import CheckpointError
from eagle_server.models.config_json import read_config


@dataclass(frozen=True)
class DraftFiles:
    """A draft checkpoint whose tensors are not read yet.

    config: the content of config.json; {} if there is none.
    tensors: by their canonical names.
    overrides: the user's replacements for keys of config.json.
    target: the target's files, if they are known.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Weights
    overrides: Mapping[str, Any] = field(default_factory=dict)
    target: Path | None = None

    @property
    def is_target(self) -> bool:
        """Whether these are the target's own files."""
        return self.target is not None and self.directory.resolve() == self.target.resolve()

    @property
    def required_config(self) -> Mapping[str, Any]:
        """`config`. Raises CheckpointError if there is no config.json."""
        return self.config or read_config(self.directory)

    @property
    def config_source(self) -> str:
        return str(self.directory / "config.json")

    def has_prefix(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self.tensors)

    def has_part(self, *parts: str) -> bool:
        return any(part in name for name in self.tensors for part in parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; () if it does not exist."""
        return self.tensors[name].shape if name in self.tensors else ()

    @property
    def num_layers(self) -> int:
        """The number of decoder layers that the tensors are numbered for; 0 if there are none.

        Raises:
            CheckpointError: a gap in the numbers.
        """
        numbers = sorted({int(layer[1]) for name in self.tensors if (layer := _LAYER.match(name))})
        if numbers != list(range(len(numbers))):
            raise CheckpointError(f"{self.directory}: the layers are numbered {numbers[:8]}, not from 0 on")
        return len(numbers)

    def matrix(self, name: str) -> tuple[int, int]:
        """(rows, columns) of a matrix; (0, 0) if it does not exist."""
        rows, columns = (self.shape(name) + (0, 0))[:2]
        return (rows, columns) if columns else (0, 0)


_TRAINER_PREFIXES = ("draft_model.", "module.", "_orig_mod.", "_fsdp_wrapped_module.")
_LEGACY_NAMES = {f"aux_norm_{part}.weight": f"fc_norm.{i}.weight" for i, part in enumerate(("low", "mid", "high"))}
_MIDLAYER = re.compile(r"midlayer\.(?:(\d+)\.)?")
_LAYER = re.compile(r"layers\.(\d+)\.")
_DEEP_HIDDEN_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.")
_INERT = re.compile(r".*rotary_emb\.inv_freq|verifier_.*")
_PARALLEL_HEADS = "parallel_draft_heads."  # ModelOpt's further heads after an EAGLE-3 head that is complete without

log = logging.getLogger(__name__)


def clean_names(stored: Weights, directory: Path) -> Weights:
    """The tensors by canonical names: without `model.`, `midlayer` as `layers.0`, legacy norms as `fc_norm.{i}`.

    ModelOpt numbers the layers of a deep EAGLE-3 head as `midlayer.{i}`. The input norm of its later layers becomes
    `input_layernorm`; SGLang and ModelOpt's export from Megatron call it `hidden_norm`.

    Raises:
        CheckpointError: a training checkpoint that was not exported, or two keys for one tensor.
    """
    clean: Weights = {}
    for key, tensor in stored.items():
        if key.startswith(_TRAINER_PREFIXES):
            raise CheckpointError(f"{tensor.file}: {key}: a training checkpoint; export it to a draft checkpoint first")
        name = canonical_name(key)
        if _INERT.fullmatch(name):
            continue
        if name in clean:
            raise CheckpointError(f"{directory}: {clean[name].key} and {key} are two names of one tensor")
        clean[name] = tensor
    extra = [name for name in clean if name.startswith(_PARALLEL_HEADS)]
    if extra:
        log.warning(
            "%s: %s*: %d tensors of parallel heads are ignored; the EAGLE-3 head drafts alone",
            directory,
            _PARALLEL_HEADS,
            len(extra),
        )
    for name in extra:
        del clean[name]
    return clean


def canonical_name(key: str) -> str:
    """The canonical name of a draft tensor, from any of its published names."""
    name = key.removeprefix("model.")
    if layer := _MIDLAYER.match(name):
        name = f"layers.{layer[1] or 0}." + name[layer.end() :]
    name = _LEGACY_NAMES.get(name, name)
    return _DEEP_HIDDEN_NORM.sub(r"layers.\1.input_layernorm.", name)


def flatten(files: DraftFiles) -> dict[str, Any]:
    """config.json as one flat object. Outer keys replace those of a nested layer config; overrides replace both.

    Raises:
        CheckpointError: config.json or the nested layer config is missing, or eagle_config is no object.
    """
    raw, overrides = dict(files.required_config), files.overrides
    if not isinstance(raw.get("eagle_config") or {}, Mapping):
        raise CheckpointError(f"{files.config_source}: eagle_config: an object is expected")
    nested_key = None
    if "speculators_model_type" in raw:
        nested_key = "transformer_layer_config"
    elif raw.get("model_type") == "eagle" and "model" in raw:
        nested_key = "model"  # drafts of vLLM's first EAGLE support
    if nested_key is not None:
        nested = raw.pop(nested_key, None)
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{files.config_source}: {nested_key}: the draft's layer config is expected here")
        for key in ("architectures", "model_type", "tie_word_embeddings"):
            raw.pop(key, None)
        raw = {**nested, **raw}
    for key in ("rope_parameters", "rope_scaling"):  # a base in either place comes before rope_theta
        if "rope_theta" in overrides and isinstance(raw.get(key), Mapping):
            raw[key] = {**raw[key], "rope_theta": overrides["rope_theta"]}
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(raw.get(key), Mapping)
        raw[key] = {**raw[key], **value} if both else value
    return raw
