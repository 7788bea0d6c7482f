"""A target that transformers' own code runs, on paged attention: for architectures whose layers are not written here.

transformers asks a registered function for attention. Ours finds, on the attention module, which layer it is (`spec`)
and the forward that is under way (`link`). Norms, positions, embeddings and the head stay theirs.
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
    """What a layer asked of attention: its module, how queries, keys and values were shaped, and its options."""

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    options: dict[str, Any]


@dataclass
class Link:
    """Between a model's attention modules and the forward that is under way; it notes the calls of unknown layers."""

    planned: BoundAttention | None = None
    calls: list[AttentionCall] = field(default_factory=list)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: query, key, value [1, heads, rows, dim] -> [1, rows, heads, value_dim]."""
    link: Link = module.link
    assert link.planned is not None, "attention outside of a forward"
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    if module.spec is None:
        given = {name: option for name, option in options.items() if option is not None}
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        link.calls.append(AttentionCall(module, q.shape[1], k.shape[1], q.shape[2], v.shape[2], given))
        return v.new_zeros(1, *q.shape[:2], v.shape[2]), None
    return link.planned.run(q, k, v, module.spec)[None], None


AttentionInterface.register(ATTENTION, attend)


@dataclass
class _Hidden(BaseModelOutputWithPastAndCrossAttentions):
    """The result of any kind of decoder: heads of mixtures of experts look at one more field."""

    router_logits: None = None


class _Echo(nn.Module):
    """In the place of a decoder: its result is what it is given as embeddings."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> _Echo:
        """What some heads (OPT's) ask for inside of it."""
        return self


class TransformersTarget(nn.Module):
    """A `Target` around a causal language model of transformers.

    Positions stop at the last that it knows, or that `context` has: trees reach past it, and what stands there is never
    emitted. (A draft model may be asked for longer texts than it knows: then its guesses get worse.)
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

    @property
    def embed(self) -> Tensor:
        return self.model.get_input_embeddings().weight  # type: ignore[no-any-return]

    def adopt(self, specs: list[tuple[nn.Module, LayerSpec]], config: ModelConfig) -> None:
        """Take what a survey found: each attention module's layer, and the shapes of its KV."""
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
        self.link.planned = attention
        try:
            out = self.model.base_model(
                input_ids=tokens[None], position_ids=positions.clamp(max=self._last)[None], use_cache=False
            )
        finally:
            self.link.planned = None
        aux = [self._captured.pop(boundary) for boundary in self.aux_boundaries]
        return TargetOutput(out.last_hidden_state[0], torch.cat(aux, dim=-1) if aux else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] in float32: transformers' own head with its scales, caps and biases."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]

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
    """The decoder layers around these attention modules, in order; none if they are not one list of layers."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attentions):
            inside = [set(layer.modules()) for layer in module]
            if all(attention in each for attention, each in zip(attentions, inside, strict=True)):
                return list(module)
    return []
