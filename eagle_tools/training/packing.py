"""Several documents in one window, and which of their tokens are trained on.

Row t of a window has the feature of token t. A chain that begins there reads the tokens t+1, t+2, ... one by one, and
its step k predicts the token t+2+k. Serving begins a chain with a token that the target wrote. So step k counts if the
tokens t+1 to t+2+k are all supervised, and of the document of t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The documents of windows [batch, length + 1]. A token sees earlier tokens of its own document only."""

    documents: Tensor  # int64 [batch, length + 1], equal for the tokens of a document; padding is one, too
    supervised: Tensor  # bool [batch, length + 1], trained on
    features: Tensor | None = None  # [batch, length + 1, n + 1, H], captured; 0 in padding. None: they are computed

    def to(self, device: torch.device) -> Packing:
        """The same on a device."""
        features = None if self.features is None else self.features.to(device)
        return Packing(self.documents.to(device), self.supervised.to(device), features)

    def positions(self) -> Tensor:
        """The place of each token in its document, int64 [batch, length + 1]."""
        places = torch.arange(self.documents.shape[1], device=self.documents.device).expand_as(self.documents)
        begins = torch.ones_like(self.supervised)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return places - torch.where(begins, places, 0).cummax(1).values

    def chains(self, steps: int) -> Tensor:
        """Whether each step of the chain that begins at each row counts, bool [steps, batch, length - 1]."""
        rows = self.documents.shape[1] - 2
        own, counts = self.documents[:, :rows], self.supervised[:, 1 : rows + 1].clone()
        found = []
        for step in range(steps):
            place = slice(2 + step, 2 + step + rows)
            known = self.supervised[:, place] & (
                self.documents[:, place] == own[:, : self.documents[:, place].shape[1]]
            )
            counts = counts & torch.nn.functional.pad(known, (0, rows - known.shape[1]))
            found.append(counts)
        return torch.stack(found)


def served_length(hits: Tensor, counted: Tensor) -> float:
    """Tokens per cycle of a server that writes the counted answers with chains of all steps.

    hits, counted: as in `chain_rates`, of every row. The first cycle reads an answer's first token, which the prompt's
    forward gave. Each next one begins behind the accepted drafts and the bonus. Where one token is left nothing is
    drafted, and so it does not count.
    """
    accepted = (hits & counted).cumprod(0).sum(0)
    tokens = cycles = 0
    for lengths, predicts in zip(accepted.tolist(), counted[0].tolist(), strict=True):
        row = 0
        while row < len(predicts) - 1:
            drafts = predicts[row] and predicts[row + 1]
            following = row + (lengths[row] + 1 if drafts else 1)
            cycles += drafts
            tokens += sum(predicts[row:following]) if drafts else 0
            row = following
    return tokens / cycles if cycles else 1.0


def chain_rates(hits: Tensor, counted: Tensor) -> tuple[list[float], float]:
    """(the share of hits of each step, mean tokens per target forward of chains), by `chains` that count.

    hits: bool [steps, batch, rows], by the row where the chain begins. A chain's later steps are counted only in
    answers that are long enough, so each step has its own mean.
    """
    rates, reached = [], []
    alive = torch.ones_like(hits[0])
    for right, counts in zip(hits, counted, strict=True):
        alive = alive & right
        total = counts.sum().clamp_min(1)
        rates.append(float((right & counts).sum() / total))
        reached.append(float((alive & counts).sum() / total))
    return rates, 1.0 + sum(reached)
