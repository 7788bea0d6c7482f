"""The P-EAGLE draft head: an EAGLE-3 head that scores several next tokens in one causal pass.

L is the length of the context, and the root stands at position L. The slots of the pass:

    p < L      (e(token p + 1), fc(N(aux[p])))     EAGLE-3's pairs; the last one has the root's embedding
    L, L+1, .. (e(mask), fc(N(mask_hidden)))        one less than there are levels

Each slot scores its next token: slot L - 1 the root's child, slot L + j the token at depth j + 2. There is no feedback.

Source: P-EAGLE (arXiv 2602.01469), speculators' `peagle` and vLLM's parallel drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.layers import Views


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """An EAGLE-3 head's config. `num_drafts`: the levels that it was trained for; None: the files do not say."""

    mask_token_id: int = 0
    num_drafts: int | None = None


class PEagleHead(Eagle3Head):
    """`Eagle3Head` with mask slots."""

    algorithm = "PEAGLE"

    def __init__(self, config: PEagleConfig, context: int, target: TargetWeights) -> None:
        super().__init__(config, context, target)
        self.mask_token_id, self.max_steps = config.mask_token_id, config.num_drafts
        width = len(config.aux_boundaries) * config.target_hidden_size
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, width))

    def rows(
        self, tokens: Tensor, features: Tensor, lens: Tensor, positions: Tensor, attention: BoundAttention
    ) -> Tensor:
        """y [bs, levels, H], levels = rows - width + 1, by one pass over the pairs and the mask slots behind them.

        tokens int64 [bs, width] with features [bs * width, n * Ht], of which the first `lens` int64 [bs] count.
        positions int64 [bs, rows]. Rows behind the mask slots are padding.
        """
        (bs, width), rows = tokens.shape, positions.shape[1]
        hidden = self.combine(torch.cat([features, self.mask_hidden[0].to(features.dtype)]))  # reads fc once
        real = torch.arange(rows, device=lens.device) < lens[:, None]  # [bs, rows]
        pairs = F.pad(hidden[:-1].unflatten(0, (bs, width)), (0, 0, 0, rows - width))
        hidden = torch.where(real[:, :, None], pairs, hidden[-1])
        fed = torch.where(real, F.pad(tokens, (0, rows - width)), self.mask_token_id)
        out = self(fed.view(-1), hidden.flatten(0, 1), positions.reshape(-1), attention)
        scoring = (lens - 1)[:, None] + torch.arange(rows - width + 1, device=lens.device)  # [bs, levels]
        normed: Tensor = out.normed.unflatten(0, (bs, rows))
        return normed.gather(1, scoring[:, :, None].expand(-1, -1, normed.shape[2]))

    def weight_views(self) -> Views:
        yield from super().weight_views()
        yield "mask_hidden", self.mask_hidden
