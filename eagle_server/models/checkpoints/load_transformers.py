"""Loads targets that transformers' code runs, and tests them before they serve.

No list says which architectures can be served. First, a survey forward records what each layer passes to attention.
Then two prompts run in one batch over paged KV, each in two chunks. Their logits must equal those of transformers for
the whole prompts. This detects state outside of keys and values, and rows that depend on each other outside of
attention.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, BoundAttention, Causal, LayerSpec, Layout
from eagle_server.attention.torch_native import TorchNativeAttention
from eagle_server.cache.pool import KVPool
from eagle_server.models.checkpoints.transformers_config import TESTED, check_rope, read_theirs, window_of
from eagle_server.models.checkpoints.weights import open_weights
from eagle_server.models.config import CheckpointError, ModelConfig
from eagle_server.models.targets.transformers import ATTENTION, AttentionCall, TransformersTarget

log = logging.getLogger(__name__)

_KNOWN = {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache", "target_dtype"}
_NAMES = {"s_aux": "attention sinks", "position_bias": "a position bias", "attention_mask": "a mask of its own"}
_LENGTHS, _CUT = (13, 7), (8, 5)  # two prompts, and the ends of their first chunks
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # relative to the norm of the logits


def load_transformers(
    directory: Path, config: ModelConfig, *, context: int, device: str | torch.device
) -> TransformersTarget:
    """Load the model of a checkpoint directory in `config.dtype`, frozen.

    Raises:
        CheckpointError: tensors are missing or unexpected, or paged attention cannot run the architecture.
    """
    log.info("%s has no class of its own here: transformers' code runs it, on paged attention", config.architecture)
    if config.architecture not in TESTED:
        log.warning(
            "%s is not among the architectures whose texts were compared with transformers': %s",
            *(config.architecture, ", ".join(TESTED)),
        )
    theirs = read_theirs(directory)
    check_rope(theirs, context, str(directory / "config.json"))
    model = _load(directory, config.dtype).to(device)
    try:
        model.set_attn_implementation(ATTENTION)
        target = TransformersTarget(model, config, context)
        _survey(target, theirs)
        error = _difference(target)
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, NotImplementedError) as reason:
        text = " ".join(str(reason).split())[:300]
        raise CheckpointError(f"{directory}: {config.architecture} cannot be served: {text}") from reason
    if not error <= _TOLERANCE[config.dtype]:
        raise CheckpointError(
            f"{directory}: {config.architecture} cannot be served: on paged attention its logits differ from "
            f"transformers' by {error:.1g} of their size, so that it must keep more than keys and values"
        )
    return target


def _load(directory: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory}: no *.safetensors here; other formats are read for native families only")
    open_weights(directory)  # reads headers only; its errors name the damaged or missing file
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
        )
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{directory}: transformers cannot load it ({reason})") from None
    model, found = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(_said(key) for key in found[kind]):
            raise CheckpointError(f"{directory}: {kind.replace('_keys', '')} tensors: {', '.join(keys[:8])}")
    return model.requires_grad_(requires_grad=False).eval()


def _said(key: Any) -> str:
    """A tensor's name; for one of another size also (name, its shape, the expected shape)."""
    if not isinstance(key, tuple):
        return str(key)
    name, stored, expected = key
    return f"{name} (expected shape {list(expected)}, found {list(stored)})"


class _NoAttention(BoundAttention):
    """`BoundAttention` of the survey. It never runs, because `attend` returns zeros for layers without a spec."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        raise AssertionError("a layer was known before the survey")


@torch.inference_mode()
def _survey(target: TransformersTarget, theirs: Any) -> None:
    """Record what each layer passes to attention, and give the target its specs and KV shapes."""
    tokens = torch.arange(3, device=target.embed.device)
    hidden = target(tokens, tokens, _NoAttention()).hidden
    calls = target.link.calls
    if len({id(call.module) for call in calls}) != target.config.num_layers or len(calls) != target.config.num_layers:
        raise ValueError(
            f"its {target.config.num_layers} layers should ask transformers' attention interface once each, and ask "
            f"{len(calls)} times"
        )
    shapes = {(call.heads, call.kv_heads, call.head_dim, call.value_dim) for call in calls}
    heads, kv_heads, head_dim, value_dim = next(iter(shapes))
    if len(shapes) > 1 or head_dim != value_dim:
        raise ValueError(
            f"its keys and values must have one shape in all layers, not {sorted(shapes)} (heads, KV heads, sizes)"
        )
    specs = [(call.module, _spec(call, index, theirs)) for index, call in enumerate(calls)]
    vocab = target.logits(hidden[:1]).shape[1]
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab}
    windows = tuple(spec.sliding_window for _, spec in specs)
    target.adopt(specs, replace(target.config, **shape, windows=windows))  # type: ignore[arg-type]


def _spec(call: AttentionCall, index: int, theirs: Any) -> LayerSpec:
    options = call.options
    if options.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise ValueError("its attention is not causal")
    for name in sorted(name for name, option in options.items() if name not in _KNOWN and option is not False):
        raise ValueError(f"its attention needs {_NAMES.get(name, name)}, which paged attention does not give")
    window, named = int(options.get("sliding_window") or 0), window_of(theirs, index)
    if (named is None and not window) or (named is not None and named != window):
        raise ValueError(f"layer {index} does not tell attention of its sliding window")
    scale = options.get("scaling")
    return LayerSpec(
        index, call.head_dim**-0.5 if scale is None else float(scale), window, float(options.get("softcap") or 0.0)
    )


@torch.inference_mode()
def _difference(target: TransformersTarget) -> float:
    """The difference between logits over paged KV and transformers' own, relative to the norm of the latter."""
    vocab, device = target.config.vocab_size, target.embed.device
    prompts = [torch.arange(n, device=device) * 7919 % (vocab - 1 - i) for i, n in enumerate(_LENGTHS)]
    target.model.set_attn_implementation("eager")
    expected = [target.model(prompt[None], use_cache=False).logits[0].float() for prompt in prompts]
    target.model.set_attn_implementation(ATTENTION)
    found = _paged_logits(target, prompts)
    worst = [(mine - theirs).norm() / theirs.norm() for mine, theirs in zip(found, expected, strict=True)]
    error = float(torch.stack(worst).max())
    return error if math.isfinite(error) else math.inf


def _paged_logits(target: TransformersTarget, prompts: Sequence[Tensor]) -> list[Tensor]:
    config, device = target.config, target.embed.device
    width = max(_LENGTHS)
    pool = KVPool(
        config.num_layers, len(prompts) * width + 1, config.num_kv_heads, config.head_dim, config.dtype, device
    )
    table = 1 + torch.arange(len(prompts) * width, device=device, dtype=torch.int32).view(-1, width).flip(0)
    attention, parts = TorchNativeAttention(pool), list[list[Tensor]]()
    for start, stop in (((0, 0), _CUT), (_CUT, _LENGTHS)):
        spans = [torch.arange(a, b, device=device) for a, b in zip(start, stop, strict=True)]
        counts = tuple(len(span) for span in spans)
        layout = Layout(counts, stop)
        slots = torch.cat([row[span] for row, span in zip(table, spans, strict=True)]).long()
        rows, lengths = torch.arange(len(prompts), device=device), torch.tensor(stop, device=device)
        batch = AttentionBatch(rows, lengths, table, slots, Causal(), layout)
        tokens = torch.cat([prompt[span] for prompt, span in zip(prompts, spans, strict=True)])
        out = target(tokens, torch.cat(spans), attention.plan(layout).bind(batch))
        parts.append(list(target.logits(out.hidden).split(counts)))
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
