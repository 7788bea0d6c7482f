"""Block drafters' checkpoints: those of z-lab (DFlash), speculators, DeepSpec and JetSpec.

Each format has its own defaults. Where the libraries that read one format disagree, and the file does not say, the
choice is logged with the override that changes it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle_server.models.checkpoints.drafts.aux_layers import block_boundaries
from eagle_server.models.checkpoints.drafts.block_edge_files import (
    OF_DRAFT_IDS,
    OF_TARGET_IDS,
    check_edges,
    confidence_of,
    convolution_of,
    edges_of,
)
from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, flatten
from eagle_server.models.checkpoints.drafts.draft_loading import as_loaded, filled, shared_weights
from eagle_server.models.checkpoints.drafts.draft_vocabulary import (
    check_vocabulary,
    draft_vocabulary,
    mask_token_id_of,
    with_map,
    with_target_rows,
    without_copies,
)
from eagle_server.models.checkpoints.drafts.eagle_files import layer_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import load_pickle
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.config_json import integer
from eagle_server.models.drafts.block import BlockConfig, BlockHead
from eagle_server.models.drafts.block_edges import EdgeConfig
from eagle_server.models.targets.interface import DraftedTarget

MASK_FILE = "mask_embedding.pt"  # MiMo's
_KNOWN = {  # keys of dflash_config
    *("target_layer_ids", "layer_ids", "mask_token_id", "mask_token", "block_size", "num_target_layers"),
    *("causal", "causal_head", "is_causal", "use_swa", "swa_window_size", "sliding_window"),
    *("sample_from_anchor", "projector_type", "target_hidden_size"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("shift_label", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"),
    *("output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {  # keys with the only values that change nothing
    "attention_sink_bias": (False, None),
    "attention_value_scale": (1, None),
    "projector_type": ("dflash", "domino", None),
    "logit_scale": (1, None),
    "is_neox_style": (True, None),
    "rope_dim": (None,),
}
_SWITCHES = {"lilicorr_": "lilicorr_enabled", "xpress_": "xpress_rank"}  # by prefix of a variant's keys; 0: it is off
_SPECULATORS_BLOCK = 8  # the library's default block_size
_CODEBOOK = re.compile(r"(candidate_selector\.\w+_codebook)\.weight")
_THETA = 10000.0  # transformers' default

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Keys:
    """config.json of a block drafter: a key may stand in dflash_config or at the top. An override comes first."""

    flat: Mapping[str, Any]
    overrides: Mapping[str, Any]
    source: str

    @classmethod
    def of(cls, files: DraftFiles) -> _Keys:
        flat = flatten(files)
        if not isinstance(flat.get("dflash_config") or {}, Mapping):
            raise CheckpointError(f"{files.config_source}: dflash_config: an object is expected")
        return cls(flat, files.overrides, files.config_source)

    @property
    def nested(self) -> Mapping[str, Any]:
        return self.flat.get("dflash_config") or {}

    @property
    def speculators(self) -> str | None:
        """The kind, if speculators wrote the file."""
        return self.flat.get("speculators_model_type")

    @property
    def deepspec(self) -> bool:
        return self.speculators is None and "dflash_config" not in self.flat and "target_layer_ids" in self.flat

    def get(self, key: str) -> Any:
        """The value under a key; None: there is none."""
        places = (self.overrides, self.nested, self.flat)
        return next((place[key] for place in places if place.get(key) is not None), None)

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {key}: true or false is expected, found {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or value <= 0):
            raise CheckpointError(f"{self.source}: {key} must be a positive number, found {value!r}")
        return float(default if value is None else value)

    def assume(self, key: str, value: object, others: str) -> None:
        """Log that a key is missing on whose default libraries disagree."""
        log.warning(
            "%s: %s is not stated, and %s; it is read as %s here; if little is accepted, try "
            "--speculative-draft-config-override with another value of it",
            *(self.source, key, others, value),
        )


def recognizes(files: DraftFiles) -> bool:
    """Whether these are the tensors of a block drafter: one norm over fc's output, which all layers share."""
    return {"fc.weight", "hidden_norm.weight"} <= set(files.tensors)


def kv_config(files: DraftFiles, target: ModelConfig) -> ModelConfig:
    """See `DraftFormat`."""
    return _layers(_Keys.of(files), files, target)


def load(files: DraftFiles, target: DraftedTarget, how: Loading) -> BlockHead:
    """The head, with the target's embedding or lm_head where it has none of its own."""
    mask, files = _mask_embedding(files), _canonical(files)
    files = with_target_rows(files, target, has_map=True, of_target_ids=OF_TARGET_IDS, of_draft_ids=OF_DRAFT_IDS)
    config = block_config(files, target.config, None if mask is None else mask[0])
    check_vocabulary(files, target, config.draft_vocab_size)
    files = with_map(without_copies(files, target), config.draft_vocab_size, target.config.vocab_size)
    config = as_loaded(config, files, how)
    check_edges(config, files.config_source)
    hidden = config.layers.hidden_size
    if hidden != target.config.hidden_size and not (config.own_embed and config.own_lm_head):
        raise CheckpointError(
            f"{files.directory}: embed_tokens.weight, lm_head.weight: missing; a draft of width {hidden} cannot share "
            f"those of a target of width {target.config.hidden_size}"
        )
    head = filled(BlockHead(config, how.positions, shared_weights(target, config)), files, how)
    ids = head.target_ids(torch.arange(config.draft_vocab_size))
    head.mask_ids = (ids == config.mask_token_id).nonzero()[:, 0]
    if mask is not None:
        if mask[1].shape != (hidden,):
            raise CheckpointError(f"{files.directory / MASK_FILE}: embedding: {hidden} numbers are expected")
        head.mask_embedding = mask[1].to(target.embed.device, target.embed.dtype)
    log.info("%s: %s", files.directory, _described(config))
    return head


def block_config(files: DraftFiles, target: ModelConfig, mask_token_id: int | None = None) -> BlockConfig:
    """The config of a block drafter. `mask_token_id`: of a file beside it.

    Raises:
        CheckpointError: a key or variant that is not known, or a config that contradicts the tensors or the target.
    """
    keys = _Keys.of(files)
    _refuse_unknown(keys)
    stated = keys.get("target_hidden_size")
    if stated not in (None, target.hidden_size):
        raise CheckpointError(
            f"{keys.source}: target_hidden_size: this draft is for targets of width {stated}, found "
            f"{target.hidden_size}"
        )
    layers = _layers(keys, files, target)
    boundaries = block_boundaries(keys.flat, layers.num_layers, target.num_layers, keys.source)
    rows, width = files.matrix("fc.weight")
    if width != len(boundaries) * target.hidden_size:
        raise CheckpointError(
            f"{files.directory}: fc.weight: expected [{layers.hidden_size}, {len(boundaries)} * {target.hidden_size}] "
            f"for boundaries {list(boundaries)} of this target, found [{rows}, {width}]"
        )
    default = _SPECULATORS_BLOCK if keys.speculators else None
    if mask_token_id is None:
        mask_token_id = mask_token_id_of(keys.get, target.vocab_size, keys.source)
    edges = edges_of(files, keys.get)
    config = BlockConfig(
        layers=layers,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocabulary(files, keys.flat.get("draft_vocab_size"), target.vocab_size),
        aux_boundaries=boundaries,
        block_size=integer({"block_size": keys.get("block_size")}, "block_size", keys.source, default=default),
        mask_token_id=mask_token_id,
        causal=_causality(keys, layers),
        next_token=_next_token(keys, edges),
        embed_scale=_embed_scale(keys, target),
        logit_scale=keys.number("output_multiplier", 1.0),
        logits_softcap=keys.number("final_logit_softcapping", 0.0),
        vocab_map="d2t" in files.tensors,
        edges=edges,
        convolution=convolution_of(files, keys.get),
    )
    config = replace(config, confidence_rank=confidence_of(files, keys.get, config))
    _check_rows(config, keys.source)
    return config


def _canonical(files: DraftFiles) -> DraftFiles:
    """`files` with one name for each codebook."""
    return replace(files, tensors={_CODEBOOK.sub(r"\1", name): tensor for name, tensor in files.tensors.items()})


def _check_rows(config: BlockConfig, source: str) -> None:
    if config.num_drafts < 1:
        raise CheckpointError(f"{source}: block_size {config.block_size}: a block of the root alone drafts nothing")
    windows = config.layers.windows or (0,) * config.layers.num_layers
    for window, causal in zip(windows, config.causal, strict=True):
        if not causal and 0 < window < config.block_size:
            raise CheckpointError(
                f"{source}: sliding_window {window}: rows that see later rows need a window of at least block_size "
                f"{config.block_size}"
            )


def _refuse_unknown(keys: _Keys) -> None:
    unknown = sorted(set(keys.nested) - _KNOWN - set(_NEUTRAL))
    if unknown:
        raise CheckpointError(f"{keys.source}: dflash_config: {', '.join(unknown)}: not supported; drop it, or update")
    for key, neutral in _NEUTRAL.items():
        if keys.get(key) not in neutral:
            raise CheckpointError(f"{keys.source}: {key}: {keys.get(key)!r} is not supported yet")
    for prefix, switch in _SWITCHES.items():
        stated = sorted(key for key in keys.flat if key.startswith(prefix))
        if stated and keys.get(switch) != 0:
            raise CheckpointError(f"{keys.source}: {', '.join(stated)}: a variant that is not supported yet")


def _layers(keys: _Keys, files: DraftFiles, target: ModelConfig) -> ModelConfig:
    flat, rope = dict(keys.flat), keys.flat.get("rope_parameters") or keys.flat.get("rope_scaling") or {}
    if flat.get("rope_theta") is None and "rope_theta" not in rope:
        keys.assume("rope_theta", _THETA, "transformers takes 1e4, vLLM 1e6")
        flat["rope_theta"] = _THETA
    kinds = flat.get("layer_types") or ()
    if keys.overrides.get("use_sliding_window") is False:
        flat["layer_types"] = ["full_attention"] * len(kinds)
    elif "sliding_attention" in kinds and flat.get("sliding_window") and not keys.flag("use_sliding_window"):
        keys.assume("use_sliding_window: true", True, "transformers drops the window without it")  # noqa: FBT003
    layers = layer_config(flat, files, target)
    if keys.flag("use_swa"):
        window = integer({"swa_window_size": keys.get("swa_window_size")}, "swa_window_size", keys.source)
        layers = replace(layers, windows=(window,) * layers.num_layers)
    return layers


def _mask_embedding(files: DraftFiles) -> tuple[int, Tensor] | None:
    """Id and embedding of the mask token in a file beside the config. None: there is none."""
    path = files.directory / MASK_FILE
    if not path.is_file():
        return None
    content = load_pickle(path)
    known = {"embedding", "mask_token_id", "per_position"}
    if not isinstance(content, Mapping) or not {"embedding", "mask_token_id"} <= set(content) <= known:
        raise CheckpointError(f"{path}: embedding and mask_token_id are expected")
    if content.get("per_position"):
        raise CheckpointError(f"{path}: per_position: an embedding per row is not supported")
    embedding, token = content["embedding"], content["mask_token_id"]
    if not isinstance(embedding, Tensor) or type(token) is not int:
        raise CheckpointError(f"{path}: embedding must be a tensor, and mask_token_id an integer")
    return token, embedding.reshape(-1)


def _causality(keys: _Keys, layers: ModelConfig) -> tuple[bool, ...]:
    """Of each layer, whether rows see only those before them: what is stated, else by the layer's window."""
    for key in ("is_causal", "causal_head"):
        if keys.flag(key) is not None and (key == "is_causal" or keys.flag(key)):
            return (bool(keys.flag(key)),) * layers.num_layers
    windows = layers.windows or (0,) * layers.num_layers
    by_window = tuple(window > 0 for window in windows)
    stated = keys.flag("causal")
    if stated is not None:
        if (stated,) * layers.num_layers != by_window:
            keys.assume("is_causal", stated, "vLLM alone reads dflash_config.causal, which differs from the layers'")
        return (stated,) * layers.num_layers
    if keys.speculators is None or not any(by_window):
        return by_window
    non_causal = keys.flag("sliding_window_non_causal")
    if non_causal is None:
        non_causal = keys.speculators == "dflash2"
        keys.assume("sliding_window_non_causal", non_causal, "speculators' default differs from vLLM's")
    return tuple(window > 0 and not non_causal for window in windows)


def _next_token(keys: _Keys, edges: EdgeConfig | None) -> bool:
    stated, shift = keys.flag("sample_from_anchor"), keys.flag("shift_label")
    if None not in (stated, shift) and stated != shift:
        raise CheckpointError(f"{keys.source}: shift_label: {shift}, but sample_from_anchor: {stated}; drop one")
    if stated is not None or shift is not None:
        return bool(stated or shift)
    if edges is not None and edges.kind == "gru":
        keys.assume("shift_label", False, "SpecForge takes false, SGLang refuses such a file")  # noqa: FBT003
    if keys.speculators == "dspark":
        keys.assume("sample_from_anchor", True, "speculators takes true, vLLM false")  # noqa: FBT003
        return True
    if keys.deepspec and "markov_rank" not in keys.flat:
        keys.assume("sample_from_anchor", True, "this is DeepSpec's format, in which vLLM takes true")  # noqa: FBT003
    return keys.deepspec


def _embed_scale(keys: _Keys, target: ModelConfig) -> float:
    if target.embed_scale != 1.0 and keys.get("input_embedding_scale") is None:
        keys.assume("input_embedding_scale", target.embed_scale, "the target scales its embeddings")
    return keys.number("input_embedding_scale", target.embed_scale)


def _described(config: BlockConfig) -> str:
    layout = "next-token" if config.next_token else "fill-in"
    windows = sorted({window for window in config.layers.windows if window})
    kinds = {True: "causal", False: "bidirectional"}
    causality = " and ".join(sorted({kinds[each] for each in config.causal}))
    edges = "" if config.edges is None else f"{config.edges.kind} edges, "
    edges += "" if config.confidence_rank is None else "confidence (not used), "
    return (
        f"a block drafter: {layout} layout, {config.num_drafts} drafts of {config.block_size} rows, "
        f"{causality}, {edges}window {windows or 'none'}, mask token {config.mask_token_id}, "
        f"streams after layers {config.aux_boundaries}"
    )
