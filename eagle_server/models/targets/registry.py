"""All target families. To add one: write its file in targets/, or its row in targets/llama.py, and list it in
`FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import architecture_name, common_config
from eagle_server.models.targets.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from eagle_server.models.targets.gemma3 import GEMMA3
from eagle_server.models.targets.gemma4 import GEMMA4
from eagle_server.models.targets.glm4_moe import GLM4_MOE, GLM4_MOE_LITE
from eagle_server.models.targets.gpt_oss import GPT_OSS
from eagle_server.models.targets.hybrids.bamba import BAMBA
from eagle_server.models.targets.hybrids.falcon_h1 import FALCON_H1
from eagle_server.models.targets.hybrids.granite_hybrid import GRANITE_HYBRID
from eagle_server.models.targets.hybrids.kimi_linear import KIMI_LINEAR
from eagle_server.models.targets.hybrids.lfm2 import LFM2, LFM2_MOE
from eagle_server.models.targets.hybrids.nemotron_h import NEMOTRON_H
from eagle_server.models.targets.hybrids.qwen3_5 import QWEN3_5
from eagle_server.models.targets.hybrids.qwen3_next import QWEN3_5_MOE, QWEN3_NEXT
from eagle_server.models.targets.interface import MtpTraits, TargetFamily
from eagle_server.models.targets.llama import LLAMA, MIMO, MISTRAL, QWEN2, QWEN3
from eagle_server.models.targets.longcat import LONGCAT_FLASH
from eagle_server.models.targets.mimo_v2 import MIMO_V2
from eagle_server.models.targets.minicpm3 import MINICPM3
from eagle_server.models.targets.qwen3_moe import QWEN3_MOE
from eagle_server.models.targets.step3p5 import STEP3P5

FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, GEMMA3, GEMMA4, GLM4_MOE),
    *(GLM4_MOE_LITE, DEEPSEEK_V2, DEEPSEEK_V3, MINICPM3, LONGCAT_FLASH, GPT_OSS, MIMO, MIMO_V2, STEP3P5),
    *(GRANITE_HYBRID, BAMBA, NEMOTRON_H, FALCON_H1, LFM2, LFM2_MOE, KIMI_LINEAR),
)

_BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
# An unknown class name that starts like this is a variant, for example a draft head: `model_type` names its family.
_VARIANTS = ("Llama", "Mistral", "Qwen", "Eagle")


def find_family(raw: Mapping[str, Any]) -> TargetFamily | None:
    """The family that a config.json names, by `architectures` or else by `model_type`; None if it is none of ours."""
    architectures = raw.get("architectures") or []
    for name in architectures:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    if architectures and not str(architectures[0]).startswith(_VARIANTS):
        return None
    return _BY_MODEL_TYPE.get(str(raw.get("model_type")))


def read_target_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The sizes and flags of a family's decoder from its parsed config.json. Error messages name `source`.

    Raises:
        CheckpointError: the family is none of ours, or a key is absent or has a value that is not supported.
    """
    family = find_family(raw)
    if family is None:
        raise CheckpointError(
            f"{source}: architecture {architecture_name(raw)!r} is not supported; supported are "
            f"{', '.join(_BY_ARCHITECTURE)}"
        )
    complete = {**family.defaults, **raw}
    complete |= {usual: raw[own] for own, usual in family.aliases.items() if own in raw}
    try:
        complete = dict(family.usual(complete, source))
        config = common_config(complete, family.architecture, source, family.partial_rotary_factor)
        return _checked_rope(family.add_flags(config, complete, source), source)
    except CheckpointError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:  # of a value of another type
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{source}: {family.architecture} cannot have these values: {reason}") from None


def _checked_rope(config: ModelConfig, source: str) -> ModelConfig:
    pairs, given = config.rope.rotary_dim(config.head_dim) // 2, len(config.rope.short_factor)
    if given not in (0, pairs):
        raise CheckpointError(f"{source}: short_factor: a number for each of {pairs} pairs is expected, found {given}")
    return config


def mtp_traits(architecture: str) -> MtpTraits:
    """The MTP layers of a family.

    Raises:
        CheckpointError: the family is none of ours, so there is no layer to make.
    """
    family = _BY_ARCHITECTURE.get(architecture)
    if family is None:
        raise CheckpointError(f"transformers' code runs {architecture}, and its MTP layers are not supported")
    return family.mtp


def decoder_layer(config: ModelConfig, layer: int) -> nn.Module:
    """Decoder layer `layer` of the family that `config.architecture` names."""
    module: nn.Module = _BY_ARCHITECTURE[config.architecture].layer(config, layer)
    return module
