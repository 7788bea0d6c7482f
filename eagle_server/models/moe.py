"""A mixture of experts: a router, routed experts, and in some families shared experts that see every token.

    s = softmax or sigmoid of the router's logits
    chosen = the k best experts by s (+ correction bias), from the best groups
    y = scale * sum over chosen of s / (sum over chosen of s, if normalized) * expert(x)  +  shared(x)

The score of a group is that of its best expert; with a correction bias, the sum of its two best. The bias balances the
load. It affects the choice of experts, but not their weights. gpt-oss's softmax over the chosen experts' logits is the
softmax over all, normalized.

Sources: DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), whose router GLM-4 MoE has too; Qwen3 (arXiv
2505.09388) has softmax scores, one group and no shared experts; gpt-oss in transformers 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.config import ClampedSwiGLU, ModelConfig, MoEConfig, SwiGLULimits
from eagle_server.models.layers import GatedMLP, Linear, Views
from eagle_server.models.ranks import summed
from eagle_server.ops.layers.fused import GATES, limited_silu_mul
from eagle_server.ops.linear.grouped import group_ends, grouped_linear
from eagle_server.ops.linear.packed import Codes
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.decoder import FeedForwardWeights
from eagle_server.ops.native.experts import SIGMOID, SOFTMAX, NativeExperts
from eagle_server.ops.native.library import available
from eagle_server.ops.native.linear import NativeWeight


class Router(nn.Module):
    """Chooses the experts of each token and their weights. Computed in float32 for every dtype of the model."""

    def __init__(self, config: MoEConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        count = config.experts + config.identities
        self.weight = nn.Parameter(torch.empty(count, hidden, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(count, dtype=torch.float32)) if config.bias else None
        is_corrected = config.routing == "noaux_tc"
        self.correction_bias = nn.Parameter(torch.zeros(count, dtype=torch.float32)) if is_corrected else None

    @property
    def group_best(self) -> int:
        """How many of its best scores make the score of a group."""
        return 1 if self.correction_bias is None else 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, H] -> (expert ids int64, weights float32), both [rows, k]."""
        if torch.is_autocast_enabled(x.device.type):  # in trainings
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x)
        return self.choose(F.linear(x.to(self.weight.dtype), self.weight, self.bias))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [rows, experts] -> as `forward`."""
        scores = logits.softmax(-1) if self.config.scoring == "softmax" else logits.sigmoid()
        with torch.no_grad():
            chosen = self._best(scores)
        weights = scores.gather(1, chosen)
        if self.config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.config.scale

    def _best(self, scores: Tensor) -> Tensor:
        config, bias = self.config, self.correction_bias
        biased = scores if bias is None else scores + bias
        if config.groups > 1:
            grouped = biased.unflatten(1, (config.groups, -1))  # [rows, groups, experts of a group]
            best = grouped.topk(min(self.group_best, grouped.shape[2])).values.sum(-1)
            refused = torch.ones_like(best, dtype=torch.bool)
            refused.scatter_(1, best.topk(config.topk_groups).indices, value=False)
            biased = grouped.masked_fill(refused.unsqueeze(-1), float("-inf")).flatten(1)
        return biased.topk(config.experts_per_token).indices

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}weight", self.weight
        if self.bias is not None:
            yield f"{prefix}bias", self.bias
        if self.correction_bias is not None:
            yield f"{prefix}e_score_correction_bias", self.correction_bias


class ExpertLinear(Linear):
    """A linear layer of every expert. The weights stand one below the other: [experts * out, in].

    `parts`: of one expert. Only the native kernels for CPUs have a packed layout for them.
    """

    def __init__(self, experts: int, in_features: int, parts: Sequence[tuple[str, int]], *, bias: bool) -> None:
        of_all = [(f"{i}.{name}", rows) for i in range(experts) for name, rows in parts]
        super().__init__(in_features, of_all, bias=bias)
        self.experts = experts

    def by_expert(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [rows, in] sorted by expert, and the expert of each row, int64 [rows] -> [rows, out]."""
        weight = self.dense_weight().unflatten(0, (self.experts, -1))
        y = grouped_linear(x, weight, group_ends(experts, self.experts))
        return y if self.bias is None else y + self.bias.unflatten(0, (self.experts, -1)).index_select(0, experts)

    def pack(self, quantization: Quantization | None = None, codes: Codes | None = None) -> None:
        """See `Linear.pack`.

        Raises:
            ValueError: `quantization` is asked for where the native kernels do not compute.
        """
        if available(self.weight.device, self.weight.dtype):
            super().pack(quantization, codes)
        elif quantization is not None:
            raise ValueError(f"--quantization {quantization}: only native kernels for CPUs compute rounded experts")
        elif codes is not None:
            with torch.no_grad():
                self.weight.copy_(codes.dense())


class Experts(nn.Module):
    """The MLPs of all experts: gate and up [E * 2F, H], and down [E * H, F]. With relu2 there is no gate."""

    def __init__(self, config: MoEConfig, hidden: int, activation: str) -> None:
        super().__init__()
        width, self.activation, self.swiglu = config.intermediate_size, activation, config.swiglu
        inward = ("up_proj",) if activation == "relu2" else ("gate_proj", "up_proj")
        self.gate_up = ExpertLinear(config.experts, hidden, [(name, width) for name in inward], bias=config.bias)
        self.down = ExpertLinear(config.experts, width, [("down_proj", hidden)], bias=config.bias)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [rows, H], chosen and weights [rows, k] -> weighted sums [rows, H]. Copies nothing to the host."""
        k = chosen.shape[1]
        experts, order = chosen.flatten().sort()  # (row, choice) pairs, sorted by expert
        y = self.gate_up.by_expert(x.index_select(0, order // k), experts)
        y = self.down.by_expert(gated(y, self.activation, self.swiglu), experts)
        pairs = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        y = y.index_select(0, pairs).unflatten(0, (-1, k))  # [rows, k, H]
        mixed: Tensor = (y * weights.unsqueeze(-1)).sum(1)
        return mixed.to(x.dtype)

    def weight_views(self, prefix: str) -> Views:
        yield from self.gate_up.weight_views(prefix)
        yield from self.down.weight_views(prefix)


def gated(gate_up: Tensor, activation: str, swiglu: ClampedSwiGLU | None) -> Tensor:
    """[rows, 2F], gate and then up -> [rows, F]."""
    if swiglu is None:
        return GATES[activation](gate_up)
    if swiglu.alpha is None:
        return limited_silu_mul(gate_up, swiglu.limit)
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    return (up + 1) * (gate * torch.sigmoid(swiglu.alpha * gate))


class MixtureOfExperts(nn.Module):
    """Replaces the MLP of a dense layer. shared_limit: of the shared experts, see `SwiGLULimits`."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, shared_limit: float = 0.0) -> None:
        super().__init__()
        self.router = Router(moe, config.hidden_size)
        self.experts = Experts(moe, config.hidden_size, config.activation)
        width = moe.shared_experts * moe.intermediate_size
        dense = replace(config, intermediate_size=width, split=None)
        self.shared = GatedMLP(dense, shared_limit) if width else None
        self.shared_gate = nn.Parameter(torch.empty(1, config.hidden_size)) if moe.shared_gate else None
        self.ranks = config.split.ranks if config.split is not None and config.split.experts else None
        self._native: NativeExperts | None = None

    def forward(self, x: Tensor) -> Tensor:
        native = self._native_experts()
        routed: Tensor = self._routed(x) if native is None else native(x)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                wide = torch.promote_types(x.dtype, torch.float32)
                scores = (x.to(wide) * self.shared_gate.to(wide)).sum(1, keepdim=True)  # in an order of the row alone
                # Over whole rows: torch computes the last few numbers of a tensor by other instructions.
                shared = shared * scores.to(shared.dtype).expand_as(shared).sigmoid()
            routed = routed + shared
        return summed(self.ranks, routed)

    def _routed(self, x: Tensor) -> Tensor:
        chosen, weights = self.router(x)
        first = self.router.config.experts  # of the identities
        if not self.router.config.identities:
            return self.experts(x, chosen, weights)  # type: ignore[no-any-return]
        gives_back = chosen >= first
        routed: Tensor = self.experts(x, chosen.masked_fill(gives_back, 0), weights.masked_fill(gives_back, 0.0))
        if self.ranks is None or self.ranks.rank == 0:
            routed = routed + (x * weights.masked_fill(~gives_back, 0.0).sum(1, keepdim=True)).to(x.dtype)
        return routed

    def native_weights(self) -> FeedForwardWeights | None:
        """See `FeedForward`."""
        experts, shared = self._native_experts(), None if self.shared is None else self.shared.native_weights()
        if experts is None or self.ranks is not None or (shared is None and self.shared is not None):
            return None
        gate = None if self.shared_gate is None else self.shared_gate.detach()[0]
        return replace(shared or FeedForwardWeights(), experts=experts, gate=gate)

    def _native_experts(self) -> NativeExperts | None:
        if self._native is None:
            native = native_experts(self.router, self.experts)
            adds = self.ranks is None or self.ranks.rank == 0
            self._native = None if native is None else replace(native, adds_identities=adds)
        return self._native

    def weight_views(self, prefix: str) -> Views:
        yield from self.router.weight_views(f"{prefix}gate.")
        yield from self.experts.weight_views(f"{prefix}experts.")
        if self.shared is not None:
            name = "shared_experts" if self.shared_gate is None else "shared_expert"
            yield from self.shared.weight_views(f"{prefix}{name}.")
        if self.shared_gate is not None:
            yield f"{prefix}shared_expert_gate.weight", self.shared_gate


def native_experts(router: Router, experts: Experts, factors: Tensor | None = None) -> NativeExperts | None:
    """Packed experts for the native kernels, which none others are. factors: float32 [experts], on their weights."""
    gate_up, down, config = experts.gate_up.native, experts.down.native, router.config
    if gate_up is None or down is None:
        return None
    return NativeExperts(
        (NativeWeight(router.weight.float()), router.bias),
        *(gate_up, down, router.correction_bias),
        chosen=config.experts_per_token,
        groups=config.groups,
        chosen_groups=config.topk_groups,
        group_best=router.group_best,
        scores=SOFTMAX if config.scoring == "softmax" else SIGMOID,
        normalize=config.normalize,
        scale=config.scale,
        activation=experts.activation,
        limit=0.0 if config.swiglu is None else config.swiglu.limit,
        alpha=0.0 if config.swiglu is None else config.swiglu.alpha or 0.0,
        factors=factors,
        identities=config.identities,
    )


def feed_forward(config: ModelConfig, layer: int) -> GatedMLP | MixtureOfExperts:
    """What a decoder layer computes after attention: experts, if `config` says so for this layer, or one MLP."""
    moe, limits = config.moe, config.swiglu_limits[layer] if config.swiglu_limits else SwiGLULimits()
    if moe is None or not moe.is_sparse(layer):
        return GatedMLP(config, limits.mlp)
    if limits.experts:
        moe = replace(moe, swiglu=ClampedSwiGLU(limits.experts, None))
    return MixtureOfExperts(config, moe, limits.mlp)
