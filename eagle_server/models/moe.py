"""DeepSeek's mixture of experts: a router, routed experts, and shared experts that see every token.

    s = softmax or sigmoid of the router's logits
    chosen = the k best experts by s (+ correction bias), from the best groups
    y = scale * sum over chosen of s / (sum over chosen of s, if normalized) * expert(x)  +  shared(x)

The score of a group is that of its best expert; with a correction bias, the sum of its two best. The bias balances the
load. It affects the choice of experts, but not their weights.

Source: DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.config import ModelConfig, MoEConfig
from eagle_server.models.layers import GatedMLP, Views
from eagle_server.models.ranks import summed
from eagle_server.ops.fused import silu_mul
from eagle_server.ops.grouped import group_ends, grouped_linear


class Router(nn.Module):
    """Chooses the experts of each token and their weights. Computed in float32 for every dtype of the model."""

    def __init__(self, config: MoEConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden, dtype=torch.float32))
        has_bias = config.routing == "noaux_tc"
        self.correction_bias = nn.Parameter(torch.zeros(config.experts, dtype=torch.float32)) if has_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, H] -> (expert ids int64, weights float32), both [rows, k]."""
        logits = F.linear(x.to(self.weight.dtype), self.weight)
        scores = logits.softmax(-1) if self.config.scoring == "softmax" else logits.sigmoid()
        with torch.no_grad():
            chosen = self._choose(scores)
        weights = scores.gather(1, chosen)
        if self.config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.config.scale

    def _choose(self, scores: Tensor) -> Tensor:
        config, bias = self.config, self.correction_bias
        biased = scores if bias is None else scores + bias
        if config.groups > 1:
            grouped = biased.unflatten(1, (config.groups, -1))  # [rows, groups, experts of a group]
            best = grouped.amax(-1) if bias is None else grouped.topk(min(2, grouped.shape[2])).values.sum(-1)
            refused = torch.ones_like(best, dtype=torch.bool)
            refused.scatter_(1, best.topk(config.topk_groups).indices, value=False)
            biased = grouped.masked_fill(refused.unsqueeze(-1), float("-inf")).flatten(1)
        return biased.topk(config.experts_per_token).indices

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}weight", self.weight
        if self.correction_bias is not None:
            yield f"{prefix}e_score_correction_bias", self.correction_bias


class Experts(nn.Module):
    """The gated MLPs of all experts in two tensors: gate and up [E, 2F, H], and down [E, H, F]."""

    def __init__(self, config: MoEConfig, hidden: int) -> None:
        super().__init__()
        self.width = config.intermediate_size
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * self.width, hidden))
        self.down = nn.Parameter(torch.empty(config.experts, hidden, self.width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [rows, H], chosen and weights [rows, k] -> weighted sums [rows, H]. Copies nothing to the host."""
        k = chosen.shape[1]
        experts, order = chosen.flatten().sort()  # (row, choice) pairs, sorted by expert
        ends = group_ends(experts, len(self.gate_up))
        y = grouped_linear(x.index_select(0, order // k), self.gate_up, ends)
        y = grouped_linear(silu_mul(y), self.down, ends)
        pairs = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        y = y.index_select(0, pairs).unflatten(0, (-1, k))  # [rows, k, H]
        mixed: Tensor = (y * weights.unsqueeze(-1)).sum(1)
        return mixed.to(x.dtype)

    def weight_views(self, prefix: str) -> Views:
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield f"{prefix}{index}.gate_proj.weight", gate_up[: self.width]
            yield f"{prefix}{index}.up_proj.weight", gate_up[self.width :]
            yield f"{prefix}{index}.down_proj.weight", down


class MixtureOfExperts(nn.Module):
    """Replaces the MLP of a dense layer."""

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.router = Router(moe, config.hidden_size)
        self.experts = Experts(moe, config.hidden_size)
        width = moe.shared_experts * moe.intermediate_size
        self.shared = GatedMLP(replace(config, intermediate_size=width, split=None)) if width else None
        self.ranks = config.split.ranks if config.split is not None and config.split.experts else None

    def forward(self, x: Tensor) -> Tensor:
        routed: Tensor = self.experts(x, *self.router(x))
        return summed(self.ranks, routed if self.shared is None else routed + self.shared(x))

    def weight_views(self, prefix: str) -> Views:
        yield from self.router.weight_views(f"{prefix}gate.")
        yield from self.experts.weight_views(f"{prefix}experts.")
        if self.shared is not None:
            yield from self.shared.weight_views(f"{prefix}shared_experts.")
