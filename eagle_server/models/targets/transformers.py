"""The fallback for architectures without a family here: transformers' code runs the model on our paged attention.

transformers calls a registered function for attention. Ours reads two attributes of the attention module: `spec`, the
layer's parameters, and `link`, the attention of the current forward. Its linear layers become ours, and on CPUs its
experts: native kernels compute them, rounded if asked. All other computation is transformers' own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import _default_apply_gate
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.pytorch_utils import Conv1D

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.cache.pool import KVShape
from eagle_server.models.config import ModelConfig
from eagle_server.models.layers import Linear
from eagle_server.models.moe import ExpertLinear
from eagle_server.models.targets.interface import TargetOutput
from eagle_server.ops.native.experts import NativeExperts

ATTENTION = "eagle_server"


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function: the module, the heads, keys and values, and the options."""

    module: nn.Module
    heads: int
    key: Tensor  # [1, kv_heads, rows, head_dim]
    value: Tensor
    options: dict[str, Any]

    @property
    def shape(self) -> KVShape:
        return KVShape(self.key.shape[1], self.key.shape[3])

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def given(self) -> tuple[int, int]:
        """Equal for layers that are given the same keys and values."""
        return self.key.data_ptr(), self.value.data_ptr()


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
        link.calls.append(AttentionCall(module, q.shape[1], key, value, given))
        return v.new_zeros(1, *q.shape[:2], v.shape[2]), None
    if not module.spec.writes:
        return link.attention.attend(q, module.spec)[None], None
    return link.attention.run(q, k, v, module.spec)[None], None


AttentionInterface.register(ATTENTION, attend)


@dataclass
class _Hidden(BaseModelOutputWithPastAndCrossAttentions):
    """The output of a decoder. Mixture-of-experts models and Gemma 4 read more fields of it."""

    router_logits: None = None
    shared_kv_states: None = None
    cache: None = None


class _Echo(nn.Module):
    """Replaces the decoder and returns its input embeddings, so that the model computes only its head."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> _Echo:
        """Some models (OPT) read this attribute of their base model."""
        return self


class _Projection(Linear):
    """One of transformers' linear layers, for inputs of any number of dimensions. A `Conv1D` is one, transposed."""

    def __init__(self, name: str, layer: nn.Linear | Conv1D) -> None:
        weight = layer.weight.t().contiguous() if isinstance(layer, Conv1D) else layer.weight  # [out, in]
        super().__init__(weight.shape[1], [(name, 0)], bias=False)
        self.parts, self.weight = ((name, weight.shape[0]),), nn.Parameter(weight, requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x.flatten(0, -2))
        return y.view(*x.shape[:-1], y.shape[-1])


class _GivenExperts(nn.Module):
    """transformers' experts by the native kernels. Its router tells each row's experts and their weights."""

    def __init__(self, theirs: Any, activation: str) -> None:
        super().__init__()
        (count, hidden, inner), self.activation = theirs.down_proj.shape, activation
        with torch.device("meta"):
            self.gate_up = ExpertLinear(count, hidden, [("gate_proj", inner), ("up_proj", inner)], bias=False)
            self.down = ExpertLinear(count, inner, [("down_proj", hidden)], bias=False)
        for linear, weight in ((self.gate_up, theirs.gate_up_proj), (self.down, theirs.down_proj)):
            linear.weight = nn.Parameter(weight.detach().flatten(0, 1), requires_grad=False)
        self._native: NativeExperts | None = None

    @staticmethod
    def activation_of(module: nn.Module) -> str | None:
        """The activation of experts that are computed; None: `module` is something else, or other experts."""
        kind: Any = module
        layout = ("has_gate", "is_concatenated", "has_bias", "is_transposed", "has_post_expert_norm")
        if [getattr(module, name, None) for name in layout] != [True, True, False, False, False]:
            return None
        if type(kind)._apply_gate is not _default_apply_gate or set(module._parameters) != {
            "gate_up_proj",
            "down_proj",
        }:
            return None
        count, hidden, inner = kind.down_proj.shape
        if kind.gate_up_proj.shape != (count, 2 * inner, hidden):
            return None
        x = torch.linspace(-4, 4, 33, device="cpu")
        known = {"silu": F.silu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
        return next((name for name, y in known.items() if torch.allclose(kind.act_fn(x), y, atol=1e-6)), None)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [rows, H], top_k_index and top_k_weights [rows, k] -> [rows, H]."""
        if self._native is None:
            gate_up, down = self.gate_up.native, self.down.native
            assert gate_up is not None and down is not None, "the experts are packed"
            self._native = NativeExperts(None, gate_up, down, activation=self.activation)
        return self._native.compute_given(hidden_states, top_k_index, top_k_weights)


class TransformersTarget(nn.Module):
    """A `Target` around a causal language model of transformers.

    Positions are clamped to the last one that the model and `context` have. Trees may reach beyond it, but tokens there
    are never returned. A draft model may also get longer texts than it supports; then only its drafts get worse.
    """

    def __init__(self, model: Any, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.model, self.config, self._last = model, config, min(context, config.max_position) - 1
        self.link = Link()
        for module in model.modules():
            module.link, module.spec = self.link, None
        self._wanted: frozenset[int] = frozenset()  # boundaries of the running forward
        self._captured: dict[int, Tensor] = {}
        output = model.get_output_embeddings()
        for module in list(model.modules()):
            for name, layer in module.named_children():
                if type(layer) in (nn.Linear, Conv1D):
                    setattr(module, name, _Projection("lm_head" if layer is output else name, layer))
        self.lm_head: Linear = model.get_output_embeddings()
        prefix = model.base_model_prefix
        self._decoder = prefix if prefix in model._modules else "model"  # Llama 4's is that of its wrapper
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, self._decoder: _Echo()}

    is_fused = False

    def use_native_experts(self) -> None:
        """Let the native kernels compute the experts of the layouts that they know. They must be packed then."""
        for module in list(self.model.modules()):
            for name, experts in module.named_children():
                if (activation := _GivenExperts.activation_of(experts)) is not None:
                    setattr(module, name, _GivenExperts(experts, activation))

    def experts(self) -> list[str]:
        """The weights [experts, out, in] that transformers' code computes, which are no linear layers."""
        return [name for name, weight in self.model.named_parameters() if len(weight.shape[2:]) == 1]

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

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: BoundAttention, aux_boundaries: Sequence[int] = ()
    ) -> TargetOutput:
        """See `Target`."""
        self.link.attention, self._wanted = attention, frozenset(aux_boundaries)
        try:
            out = getattr(self.model, self._decoder)(
                input_ids=tokens[None], position_ids=positions.clamp(max=self._last)[None], use_cache=False
            )
        finally:
            self.link.attention, self._wanted = None, frozenset()
        aux = [self._captured.pop(boundary) for boundary in aux_boundaries]
        return TargetOutput(out.last_hidden_state[0], torch.cat(aux, dim=-1) if aux else None)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Float32: some heads give it whatever the model's dtype is."""
        return torch.float32

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab] in float32, by transformers' own head with its scales, caps and biases."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float() if out is None else out.copy_(logits)

    def _capture(self, boundary: int) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if boundary in self._wanted:
                self._captured[boundary] = (args[0] if args else kwargs["hidden_states"])[0]

        return before

    def _capture_last(self, boundary: int) -> Any:
        def after(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            if boundary in self._wanted:
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
