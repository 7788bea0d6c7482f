"""The ReDrafter head: a recurrent state over the drafted tokens, beside the target's hidden state, which stays fixed.

    s_0 = 0
    s_k = SiLU(rnn_w(e(g_k)) + rnn_u(s_{k-1}))        without rnn:  s_k = e(g_k) + s_{k-1}
    logits = W blocks(input_proj(cat(h, s_k)))        blocks: x + SiLU(linear(x)), num_draft_layers of them

h is the target's post-norm hidden state of the position before g_1, e its embedding. The logits after g_k are those of
g_{k+1}. There is no input_proj where exit_dim is 2H already.

Source: Recurrent Drafter (arXiv 2403.09919) and the checkpoints of apple/ml-recurrent-drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.layers import Linear, Views


@dataclass(frozen=True)
class RedrafterConfig:
    """What a checkpoint says of itself; vocab_size and hidden_size equal the target's."""

    vocab_size: int
    hidden_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool


class RedrafterHead(nn.Module):
    """A drafter of its own kind: it keeps no KV, and its state starts anew in every cycle."""

    def __init__(self, config: RedrafterConfig, target: TargetWeights) -> None:
        super().__init__()
        self.config = config
        self.aux_boundaries: tuple[int, ...] = ()  # the feature is the post-norm hidden state
        self._target = target
        hidden, exit_dim, layers = config.hidden_size, config.exit_dim, config.num_draft_layers
        self.rnn_u = Linear(hidden, [("rnn_u", hidden)], bias=True) if config.rnn else None
        self.rnn_w = Linear(hidden, [("rnn_w", hidden)]) if config.rnn else None
        projects = exit_dim != 2 * hidden
        self.input_proj = Linear(2 * hidden, [("input_proj", exit_dim)], bias=True) if projects else None
        self.blocks = nn.ModuleList(
            Linear(exit_dim, [(f"lm_head.{i}.linear", exit_dim)], bias=True) for i in range(layers)
        )
        self.lm_head = Linear(exit_dim, [(f"lm_head.{layers}", config.vocab_size)])

    @property
    def draft_vocab_size(self) -> int:
        """How many tokens it can draft."""
        return self.config.vocab_size

    def state(self, tokens: Tensor, before: Tensor | None) -> Tensor:
        """The states [rows, H] after tokens [rows]; `before` are the states ahead of them, None: the first ones."""
        embedded = F.embedding(tokens, self._target.embed)
        if self.rnn_u is None or self.rnn_w is None:
            return embedded if before is None else embedded + before
        earlier = self.rnn_u.bias if before is None else self.rnn_u(before)
        return F.silu(self.rnn_w(embedded) + earlier)

    def logits(self, context: Tensor, state: Tensor) -> Tensor:
        """context, state [rows, H] -> [rows, V] in float32."""
        x = torch.cat([context, state], dim=-1)
        if self.input_proj is not None:
            x = self.input_proj(x)
        for linear in self.blocks:
            x = x + F.silu(linear(x))
        return self.lm_head(x).float()  # type: ignore[no-any-return]

    def weight_views(self) -> Views:
        """Every published name with its place in this head."""
        for module in (self.rnn_u, self.rnn_w, self.input_proj, *self.blocks, self.lm_head):
            if module is not None:
                yield from module.weight_views("")
