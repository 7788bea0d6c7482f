"""All native target families. To add one: write its file in targets/ and list it in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import architecture_name, common_config
from eagle_server.models.layers import DecoderLayer
from eagle_server.models.targets.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from eagle_server.models.targets.interface import TargetFamily
from eagle_server.models.targets.llama import LLAMA
from eagle_server.models.targets.mistral import MISTRAL
from eagle_server.models.targets.qwen2 import QWEN2
from eagle_server.models.targets.qwen3 import QWEN3

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, DEEPSEEK_V2, DEEPSEEK_V3)

_BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
# An unknown class name that starts like this is a variant, for example a draft head: `model_type` names its family.
_VARIANTS = ("Llama", "Mistral", "Qwen", "Eagle")


def find_family(raw: Mapping[str, Any]) -> TargetFamily | None:
    """The family that a config.json names, by `architectures` or else by `model_type`; None if it is not native."""
    architectures = raw.get("architectures") or []
    for name in architectures:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    if architectures and not str(architectures[0]).startswith(_VARIANTS):
        return None
    return _BY_MODEL_TYPE.get(raw.get("model_type", ""))


def read_target_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The sizes and flags of a native decoder from its parsed config.json. Error messages name `source`.

    Raises:
        CheckpointError: the family is not native, or a key is absent or has a value that is not supported.
    """
    family = find_family(raw)
    if family is None:
        raise CheckpointError(
            f"{source}: architecture {architecture_name(raw)!r} is not supported; supported are "
            f"{', '.join(_BY_ARCHITECTURE)}"
        )
    return family.add_flags(common_config(raw, family.architecture, source), raw, source)


def decoder_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    """Decoder layer `layer` of the family that `config.architecture` names."""
    return _BY_ARCHITECTURE[config.architecture].layer(config, layer)
