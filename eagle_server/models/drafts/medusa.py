"""Medusa heads: all predict from the target's last hidden state h, each for a different later position.

    x = h;  x = x + SiLU(W_j x + b_j)  for each residual block j;  logits = lm_head(x)

Head i, counted from 0, predicts the token at t + 2 + i from h at position t. Each head has its own lm_head, or all use
the target's.

Source: Medusa (arXiv 2401.10774), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.drafts.interface import DraftModel, TargetWeights
from eagle_server.models.layers import Linear, Views


@dataclass(frozen=True)
class MedusaConfig:
    """The number of heads and of residual blocks per head. The other sizes are the target's."""

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    own_lm_heads: bool = True


class MedusaHeads(DraftModel):
    """All heads of a target. They have no KV. Shared weights are not registered, so they are not trained or saved."""

    algorithm = "MEDUSA"

    def __init__(self, config: MedusaConfig, target: TargetWeights) -> None:
        super().__init__()
        self.config = config
        self.max_steps = config.heads
        self._target = target
        hidden, each = config.hidden_size, range(config.heads)

        def block(layer: int, heads: range) -> Linear:
            return Linear(hidden, [(f"{i}.{layer}.linear", hidden) for i in heads], bias=True)

        # The first blocks of all heads read the same h, so they are one matrix.
        self.first = block(0, each) if config.layers else None
        later = range(1, config.layers)
        self.later = nn.ModuleList(nn.ModuleList(block(j, range(i, i + 1)) for i in each) for j in later)
        own = each if config.own_lm_heads else range(0)
        lm_heads = (Linear(hidden, [(f"{i}.{config.layers}", config.vocab_size)]) for i in own)
        self.lm_heads = nn.ModuleList(lm_heads)
        self.shared_rows: Linear | None = None  # of the target's lm_head, for a token map

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def keep_rows(self, token_map: Tensor) -> None:
        if self.lm_heads:
            self.lm_heads = nn.ModuleList(head.with_rows(token_map) for head in self.lm_heads)  # type: ignore[operator]
        else:
            self.shared_rows = self._target.lm_head.with_rows(token_map)

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """h [rows, H] -> logits of the first `heads` heads (None: all), float32 [heads, rows, draft vocabulary]."""
        x = self.states(hidden, heads)
        if not self.lm_heads:  # one product for all heads
            return self.head_logits(0, x.flatten(0, 1)).float().view(*x.shape[:2], -1)
        return torch.stack([self.head_logits(i, each) for i, each in enumerate(x)]).float()

    def states(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """h [rows, H] -> what the first `heads` heads (None: all) make their logits of, [heads, rows, H]."""
        count = heads or self.config.heads
        x = hidden.expand(count, -1, -1)
        if self.first is not None:
            gate = self.first(hidden).unflatten(-1, (-1, hidden.shape[-1]))[:, :count]
            x = x + F.silu(gate).transpose(0, 1)
        for blocks in self.later:
            gates = [blocks[i](x[i]) for i in range(count)]  # type: ignore[index]
            x = x + F.silu(torch.stack(gates))
        return x

    def head_logits(self, head: int, state: Tensor) -> Tensor:
        """A head's `states` [rows, H] -> its logits [rows, draft vocabulary]."""
        if self.lm_heads:
            return self.lm_heads[head](state)  # type: ignore[no-any-return]
        shared = self._target.lm_head if self.shared_rows is None else self.shared_rows
        return shared(state)  # type: ignore[no-any-return]

    def weight_views(self) -> Views:
        """Every published name with its view of a parameter."""
        if self.first is not None:
            yield from self.first.weight_views("")
        for blocks in self.later:
            for block in blocks.children():
                yield from block.weight_views("")  # type: ignore[operator]
        for head in self.lm_heads:
            yield from head.weight_views("")  # type: ignore[operator]
