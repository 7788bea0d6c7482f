"""Loads targets that transformers' code runs, and tests them before they serve.

No list says which architectures can be served. First, a survey forward records what each layer passes to attention.
Then two prompts run in one batch over paged KV, each in two chunks. Their logits must equal those of transformers for
the whole prompts. This detects state outside of keys and values, and rows that depend on each other outside of
attention.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, BoundAttention, Causal, LayerSpec, Layout
from eagle_server.attention.torch_native import torch_native
from eagle_server.cache.pool import pool_of
from eagle_server.models.checkpoints.quantized import Rounded, with_dequantized, without_added_biases
from eagle_server.models.checkpoints.transformers_config import TESTED, check_rope, read_theirs, window_of
from eagle_server.models.checkpoints.weights import QuantizedTensor, StoredTensor, Weights, open_weights, without_drafts
from eagle_server.models.config import CheckpointError, ModelConfig, SharedKV
from eagle_server.models.config_json import read_config
from eagle_server.models.layers import Linear, pack_linears
from eagle_server.models.targets.transformers import ATTENTION, AttentionCall, TransformersTarget
from eagle_server.ops.host_reads import HostReads
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.library import available

log = logging.getLogger(__name__)

_KNOWN = {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux"} | {
    "position_ids",
    "use_cache",
    "target_dtype",
}
_NAMES = {"position_bias": "a position bias", "attention_mask": "a mask of its own"}
_LENGTHS, _CUT = (13, 7), (8, 5)  # two prompts, and the ends of their first chunks
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # relative to the norm of the logits


def load_transformers(
    directory: Path,
    config: ModelConfig,
    *,
    context: int,
    device: str | torch.device,
    quantization: Quantization | None = None,
    progress: bool = False,
) -> TransformersTarget:
    """Load the model of a checkpoint directory in `config.dtype`, frozen, its linear layers packed and maybe rounded.

    Raises:
        CheckpointError: tensors are missing or unexpected, paged attention cannot run the architecture, or it cannot be
            rounded.
    """
    log.info(
        "%s has no class of its own here: transformers' code runs it, on paged attention; it lacks --tp-size and the "
        "single native call that computes all layers on a CPU",
        config.architecture,
    )
    if config.architecture not in TESTED:
        log.warning(
            "%s is not among the architectures whose texts were compared with transformers': %s",
            *(config.architecture, ", ".join(TESTED)),
        )
    theirs = read_theirs(directory)
    check_rope(theirs, context, str(directory / "config.json"))
    raw, source = read_config(directory), str(directory / "config.json")
    stored = with_dequantized(open_weights(directory), raw, source)  # reads headers only
    stored = without_drafts(stored, config.num_layers)
    model = _load(directory, config, theirs, stored).to(device)
    try:
        model.set_attn_implementation(ATTENTION)
        target = TransformersTarget(model, config, context)
        _survey(target, theirs)
        _pack(target, directory, stored, quantization, progress=progress)
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, NotImplementedError) as reason:
        if isinstance(reason, CheckpointError):
            raise
        text = " ".join(str(reason).split())[:300]
        raise CheckpointError(f"{directory}: {config.architecture} cannot be served: {text}") from reason
    return target


@torch.inference_mode()
def _pack(
    target: TransformersTarget, directory: Path, stored: Weights, quantization: Quantization | None, *, progress: bool
) -> None:
    """Pack the linear layers. The logits are compared with transformers' before and after, as code may read weights."""
    architecture, prompts = target.config.architecture, _prompts(target)
    device, dtype = target.embed.device, target.config.dtype
    target.model.set_attn_implementation("eager")
    expected = [target.model(prompt[None], use_cache=False).logits[0].float() for prompt in prompts]
    target.model.set_attn_implementation(ATTENTION)
    error = _difference(target, prompts, expected)
    if error <= _TOLERANCE[dtype]:
        if available(device, dtype):
            target.use_native_experts()
        if quantization is not None and (experts := target.experts()):
            raise CheckpointError(
                f"{directory}: --quantization {quantization}: {architecture} has experts ({experts[0]}, ...), which "
                "transformers' code computes; drop it"
            )
        rounded = _rounded(target, stored) if device.type == "cuda" or available(device, dtype) else {}
        pack_linears(target, quantization, rounded, progress=progress)
        if quantization is None and not rounded:
            error = max(error, _difference(target, prompts, expected))
    if not error <= _TOLERANCE[dtype]:
        raise CheckpointError(
            f"{directory}: {architecture} cannot be served: on paged attention its logits differ from "
            f"transformers' by {error:.1g} of their size, so that it must keep more than keys and values"
        )


def _load(directory: Path, config: ModelConfig, theirs: Any, stored: Weights) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if hasattr(theirs, "quantization_config"):  # transformers gets floats, and needs no packer's library
        theirs = copy.deepcopy(theirs)
        del theirs.quantization_config
    try:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(theirs)]
        with torch.device("meta"):
            stored = without_added_biases(stored, model_class(theirs).state_dict())
        model, found = model_class.from_pretrained(
            None,
            config=theirs,
            state_dict={name: _OnDemand(tensor) for name, tensor in stored.items()},
            dtype=config.dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{directory}: transformers cannot load it ({reason})") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(_said(key) for key in found[kind]):
            raise CheckpointError(f"{directory}: {kind.replace('_keys', '')} tensors: {', '.join(keys[:8])}")
    return model.requires_grad_(requires_grad=False).eval()


@dataclass(frozen=True)
class _OnDemand:
    """A stored tensor as transformers' loader takes it: what is indexed is read. No other tensor is."""

    stored: StoredTensor

    def __getitem__(self, index: Any) -> Tensor:
        return self.stored.read()[index]


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
    """Record what each layer passes to attention, and what waits for the device. Set the target's specs and shapes."""
    tokens = torch.arange(3, device=target.embed.device)
    with HostReads() as reads:
        hidden = target(tokens, tokens, _NoAttention()).hidden
        vocab = target.logits(hidden[:1]).shape[1]
    calls = target.link.calls
    if len({id(call.module) for call in calls}) != target.config.num_layers or len(calls) != target.config.num_layers:
        raise ValueError(
            f"its {target.config.num_layers} layers should ask transformers' attention interface once each, and ask "
            f"{len(calls)} times"
        )
    heads, (kv_heads, head_dim) = calls[0].heads, calls[0].shape
    for call in calls:
        if call.heads != heads or call.value_dim != call.shape.head_dim:
            raise ValueError(
                f"its layers must have one number of heads, and keys as wide as values, not {call.heads} heads beside "
                f"{heads}, and {call.shape.head_dim} beside {call.value_dim}"
            )
    written: dict[tuple[int, int], int] = {}  # the layer of the pool, by the tensors that it wrote
    sources = [written.setdefault(call.given, len(written)) for call in calls]
    firsts = [sources.index(source) for source in range(len(written))]
    shapes = tuple(calls[first].shape for first in firsts)
    specs = [
        (call.module, replace(_spec(call, layer, theirs), index=source, writes=firsts[source] == layer))
        for layer, (call, source) in enumerate(zip(calls, sources, strict=True))
    ]
    shape: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab}
    windows = tuple(spec.sliding_window for _, spec in specs)
    states = tuple(
        (shapes[spec.index] if spec.writes else SharedKV(spec.index, shapes[spec.index]),) for _, spec in specs
    )
    waits = next(iter(reads.operations), "")
    target.adopt(specs, replace(target.config, **shape, states=states, windows=windows, waits=waits))


def _spec(call: AttentionCall, layer: int, theirs: Any) -> LayerSpec:
    options = call.options
    if options.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise ValueError("its attention is not causal")
    for name in sorted(name for name, option in options.items() if name not in _KNOWN and option is not False):
        raise ValueError(f"its attention needs {_NAMES.get(name, name)}, which paged attention does not give")
    window, named = int(options.get("sliding_window") or 0), window_of(theirs, layer)
    if (named is None and not window) or (named is not None and named != window):
        raise ValueError(f"layer {layer} does not tell attention of its sliding window")
    scale, sinks = options.get("scaling"), options.get("s_aux")
    if sinks is not None and sinks.shape != (call.heads,):
        raise ValueError(f"its attention sinks must be one per head, not {list(sinks.shape)}")
    return LayerSpec(
        layer,
        call.shape.head_dim**-0.5 if scale is None else float(scale),
        window,
        float(options.get("softcap") or 0.0),
        None if sinks is None else sinks.detach().float().clone(),
    )


def _rounded(target: TransformersTarget, stored: Weights) -> dict[Linear, Rounded]:
    """The linear layers whose weights are stored in integers under their own names."""
    rounded: dict[Linear, Rounded] = {}
    for name, linear in target.model.named_modules():
        weight = stored.get(f"{name}.weight")
        if isinstance(linear, Linear) and isinstance(weight, QuantizedTensor) and weight.shape == linear.weight.shape:
            rounded[linear] = Rounded({name: weight}, (linear.weight,))
    return rounded


def _prompts(target: TransformersTarget) -> list[Tensor]:
    last = target.config.vocab_size - 1
    return [torch.arange(n, device=target.embed.device) * 7919 % (last - i) for i, n in enumerate(_LENGTHS)]


def _difference(target: TransformersTarget, prompts: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The difference between logits over paged KV and the expected ones, relative to the norm of the latter."""
    pairs = zip(_paged_logits(target, prompts), expected, strict=True)
    error = float(torch.stack([(paged - whole).norm() / whole.norm() for paged, whole in pairs]).max())
    return error if math.isfinite(error) else math.inf


def _paged_logits(target: TransformersTarget, prompts: Sequence[Tensor]) -> list[Tensor]:
    config, device = target.config, target.embed.device
    width = max(_LENGTHS)
    pool = pool_of(config.pool_layers, len(prompts) * width + 1, config.dtype, device)
    table = 1 + torch.arange(len(prompts) * width, device=device, dtype=torch.int32).view(-1, width).flip(0)
    attention, parts = torch_native(pool), list[list[Tensor]]()
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
