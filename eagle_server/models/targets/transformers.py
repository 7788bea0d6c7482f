"""The fallback for architectures without a native family: transformers' code runs the model on our paged attention.

transformers calls a registered function for attention. Ours reads two attributes of the attention module: `spec`, the
layer's parameters, and `link`, the attention of the current forward. All other computation is transformers' own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import Linear
from eagle_server.models.targets.interface import TargetOutput

ATTENTION = "eagle_server"


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function: the module, the shapes of queries, keys and values, and the options."""

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    options: dict[str, Any]


@dataclass
class Link:
    """Connects the attention modules of a model to the current forward. Records the calls of layers without a spec."""

    attention: BoundAttention | None = None
    calls: list[AttentionCall] = field(default_factory=list)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: query, key, value [1, heads, rows, dim] -> [1, rows, heads, value_dim]."""
    link: Link = module.link
    assert link.attention is not None, "attention outside of a forward"
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    if module.spec is None:
        given = {name: option for name, option in options.items() if option is not None}
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        link.calls.append(AttentionCall(module, q.shape[1], k.shape[1], q.shape[2], v.shape[2], given))
        return v.new_zeros(1, *q.shape[:2], v.shape[2]), None
    return link.attention.run(q, k, v, module.spec)[None], None


AttentionInterface.register(ATTENTION, attend)


@dataclass
class _Hidden(BaseModelOutputWithPastAndCrossAttentions):
    """The output of a decoder. Mixture-of-experts models read one more field of it."""

    router_logits: None = None


class _Echo(nn.Module):
    """Replaces the decoder and returns its input embeddings, so that the model computes only its head."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> _Echo:
        """Some models (OPT) read this attribute of their base model."""
        return self


class TransformersTarget(nn.Module):
    """A `Target` around a causal language model of transformers.

    Positions are clamped to the last one that the model and `context` have. Trees may reach beyond it, but tokens there
    are never returned. A draft model may also get longer texts than it supports; then only its drafts get worse.
    """

    def __init__(self, model: Any, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.model, self.config, self._last = model, config, min(context, config.max_position) - 1
        self.aux_boundaries: tuple[int, ...] = ()
        self.link = Link()
        for module in model.modules():
            module.link, module.spec = self.link, None
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: _Echo()}
        self._captured: dict[int, Tensor] = {}
        output = model.get_output_embeddings()
        bias = getattr(output, "bias", None)
        self.lm_head = Linear(output.weight.shape[1], [("lm_head", 0)], bias=bias is not None)
        self.lm_head.parts, self.lm_head.weight, self.lm_head.bias = (
            (("lm_head", output.weight.shape[0]),),
            output.weight,
            bias,
        )

    is_fused = False

    @property
    def embed(self) -> Tensor:
        return self.model.get_input_embeddings().weight  # type: ignore[no-any-return]

    def adopt(self, specs: list[tuple[nn.Module, LayerSpec]], config: ModelConfig) -> None:
        """Set the spec of each attention module, and the config with the shapes of the KV, both from the survey."""
        self.config = config
        self.link.calls.clear()
        for module, spec in specs:
            module.spec = spec  # type: ignore[assignment]
        layers = _layers(self.model, [module for module, _ in specs])
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._capture(index), with_kwargs=True)
        if layers:
            layers[-1].register_forward_hook(self._capture_last(len(layers)))

    def forward(self, tokens: Tensor, positions: Tensor, attention: BoundAttention) -> TargetOutput:
        """tokens, positions [rows] -> hidden states of every row."""
        self.link.attention = attention
        try:
            out = self.model.base_model(
                input_ids=tokens[None], position_ids=positions.clamp(max=self._last)[None], use_cache=False
            )
        finally:
            self.link.attention = None
        aux = [self._captured.pop(boundary) for boundary in self.aux_boundaries]
        return TargetOutput(out.last_hidden_state[0], torch.cat(aux, dim=-1) if aux else None)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab] in float32, by transformers' own head with its scales, caps and biases."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float() if out is None else out.copy_(logits)

    def _capture(self, boundary: int) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if boundary in self.aux_boundaries:
                self._captured[boundary] = (args[0] if args else kwargs["hidden_states"])[0]

        return before

    def _capture_last(self, boundary: int) -> Any:
        def after(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            if boundary in self.aux_boundaries:
                self._captured[boundary] = (out if isinstance(out, Tensor) else out[0])[0]

        return after


def _layers(model: nn.Module, attentions: list[nn.Module]) -> list[nn.Module]:
    """The decoder layers that contain these attention modules, in order; [] if they are not in one ModuleList."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attentions):
            inside = [set(layer.modules()) for layer in module]
            if all(attention in each for attention, each in zip(attentions, inside, strict=True)):
                return list(module)
    return []
