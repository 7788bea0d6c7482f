"""Dense forwards of target and head over whole texts. Tests compare the engine's paged forwards with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.drafts.interface import DraftHead, DraftOutput
from eagle_server.models.targets.decoder import TargetModel


class Recording(BoundAttention):
    """`BoundAttention`: plain causal attention over one sequence. It records the keys and values of every layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._causal = DenseCausal(1)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        assert layer.index == len(self.keys)
        self.keys.append(k)
        self.values.append(v)
        return self._causal.run(q, k, v, layer)


def features_of(
    target: TargetModel, tokens: Sequence[int], aux_boundaries: tuple[int, ...] = (), attention: Recording | None = None
) -> Tensor:
    """A head's input features at every token: the residual streams at its boundaries, or else the last hidden state."""
    out = target(torch.tensor(tokens), torch.arange(len(tokens)), attention or Recording(), aux_boundaries)
    return out.hidden if out.aux is None else out.aux


def extend(head: DraftHead, features: Tensor, tokens: Sequence[int], attention: Recording) -> DraftOutput:
    """The head's forward over a text. Row p has features[p] and tokens[p + 1]."""
    return head(torch.tensor(tokens[1:]), head.combine(features), torch.arange(len(tokens) - 1), attention)


def follow_path(head: DraftHead, features: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
    """Draft a path after a text, one token at a time, each from the feedback of the previous one. Logits [path, Vd].

    Every step is a new causal pass over the whole text and path, so it shares nothing with other branches.
    """
    hidden, inputs = head.combine(features), list(tokens[1:])
    last = extend(head, features, tokens, Recording()).feedback[-1:]
    logits = []
    for token in path:
        hidden, inputs = torch.cat([hidden, last]), [*inputs, token]
        out = head(torch.tensor(inputs), hidden, torch.arange(len(inputs)), Recording())
        last = out.feedback[-1:]
        logits.append(head.logits(out.normed[-1:]))
    return torch.cat(logits)
