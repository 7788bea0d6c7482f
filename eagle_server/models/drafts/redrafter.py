"""The ReDrafter head: a recurrent state over the drafted tokens, and the target's hidden state h, which stays fixed.

    s_0 = 0
    s_k = SiLU(rnn_w(e(g_k)) + rnn_u(s_{k-1}))        without rnn:  s_k = e(g_k) + s_{k-1}
    logits = W blocks(input_proj(cat(h, s_k)))        blocks: x + SiLU(linear(x)), num_draft_layers of them

g_k is the k-th drafted token, e the target's embedding, h the target's post-norm hidden state at the position before
g_1. The logits after g_k predict g_{k+1}. If exit_dim is 2H, there is no input_proj.

Source: Recurrent Drafter (arXiv 2403.09919) and the checkpoints of apple/ml-recurrent-drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.drafts.interface import DraftModel, TargetWeights
from eagle_server.models.layers import Linear, Views


@dataclass(frozen=True)
class RedrafterConfig:
    """Sizes and flags of a ReDrafter head. vocab_size and hidden_size equal the target's."""

    vocab_size: int
    hidden_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool


class RedrafterHead(DraftModel):
    """The head has no KV. Its recurrent state starts at zero in every cycle."""

    algorithm = "REDRAFTER"

    def __init__(self, config: RedrafterConfig, target: TargetWeights) -> None:
        super().__init__()
        self.config = config
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
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def keep_rows(self, token_map: Tensor) -> None:
        self.lm_head = self.lm_head.with_rows(token_map)

    def state(self, tokens: Tensor, before: Tensor | None) -> Tensor:
        """The states [rows, H] after tokens [rows]. `before`: the states [rows, H] before them, None for s_0."""
        embedded = F.embedding(tokens, self._target.embed)
        if self.rnn_u is None or self.rnn_w is None:
            return embedded if before is None else embedded + before
        earlier = self.rnn_u.bias if before is None else self.rnn_u(before)
        return F.silu(self.rnn_w(embedded) + earlier)

    def logits(self, context: Tensor, state: Tensor) -> Tensor:
        """context, state [rows, H] -> [rows, draft vocabulary] in float32."""
        x = torch.cat([context, state], dim=-1)
        if self.input_proj is not None:
            x = self.input_proj(x)
        for linear in self.blocks:
            x = x + F.silu(linear(x))
        return self.lm_head(x).float()  # type: ignore[no-any-return]

    def weight_views(self) -> Views:
        """Every published name with its view of a parameter."""
        for module in (self.rnn_u, self.rnn_w, self.input_proj, *self.blocks, self.lm_head):
            if module is not None:
                yield from module.weight_views("")
