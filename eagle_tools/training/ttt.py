"""Training-time test (EAGLE-3, arXiv 2503.01840): a head is trained on its own feedback, as in serving.

Row t has the token at t+1 and the feature of t, at RoPE position t, and predicts the token at t+2. In pass 0 the
features are the target's. In pass s, row t is step s of a chain that started from the target's feature of row t-s. The
feature of row t is then the feedback of row t-1 in pass s-1; tokens and positions stay. So S passes train S steps of
the chains that begin at every row of a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.losses import coupled_acceptance, overlap
from eagle_tools.training.packing import Packing, counted_loss
from eagle_tools.training.recipes import LossName

PASS_DECAY = 0.8


class RolloutAttention(BoundAttention):
    """A `BoundAttention` for all passes over `batch` sequences of one length. It keeps the keys of earlier passes.

    In pass s, row t sees the keys of pass 0 at rows 0..t-s (the prefix), and those of pass j at row t-s+j for j = 1..s
    (its own chain, itself included). The chains of rows t < s begin before the text: their values stay finite, and no
    valid row sees them. Heads trained here have no sliding window.

    packing: documents that do not see each other; None: each sequence is one.
    """

    def __init__(self, batch: int, packing: Packing | None = None) -> None:
        self.batch, self.packing = batch, packing
        self._passes: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: k, v [batch, kv_heads, length, head_dim]

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """q, k [batch * length, heads or kv_heads, head_dim], v [.., kv_heads, value_dim] -> [.., heads, value_dim]."""
        passes = self._passes.setdefault(layer.index, [])
        keys, values = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (k, v))
        passes.append((keys, values))
        last, length = len(passes) - 1, keys.shape[2]
        if last == 0:
            bias = None if self.packing is None else self.packing.bias(length)
            return DenseCausal(self.batch, bias).run(q, k, v, layer)
        grouped = q.unflatten(0, (self.batch, length)).unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
        chain = [(_down(a, last - j), _down(b, last - j)) for j, (a, b) in enumerate(passes) if j > 0]
        prefix_keys, prefix_values = (x.unsqueeze(2) for x in passes[0])  # [batch, kv_heads, 1, length, head_dim]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1 - last)  # t' > t - last
        if self.packing is not None:
            hidden = hidden | self.packing.strangers(length)[:, None, None]
        scores = (grouped @ prefix_keys.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        later = [(grouped * a.unsqueeze(2)).sum(-1, keepdim=True) for a, _ in chain]
        weights = (torch.cat([scores, *later], dim=-1).float() * layer.scale).softmax(-1).to(v.dtype)
        out = weights[..., :length] @ prefix_values
        for j, (_, b) in enumerate(chain):
            out = out + weights[..., length + j, None] * b.unsqueeze(2)
        return out.permute(0, 3, 1, 2, 4).reshape(*q.shape[:2], v.shape[2])


@dataclass(frozen=True)
class Lesson:
    """A batch of texts, and the target's features and distributions for it. Rows are [batch * length]."""

    batch: int
    tokens: Tensor  # int64 [rows], the token at t+1
    positions: Tensor  # int64 [rows]
    features: Tensor  # [rows, n * Ht], of t
    # float32 [rows, Vd], the target's distribution of the token at t+2, restricted to the draft vocabulary
    probs: Tensor
    following: Tensor  # int64 [rows], the token at t+2
    temperature: float  # of probs
    packing: Packing | None = None  # of the window; None: each text is one document, and all of it counts


@torch.no_grad()
def teach(
    target: TargetModel,
    window: Tensor,
    draft_ids: Tensor,
    aux_boundaries: tuple[int, ...] = (),
    temperature: float = 1.0,
    packing: Packing | None = None,
) -> Lesson:
    """The lesson of the texts `window` [batch, length + 2], for a head with the draft vocabulary `draft_ids` [Vd].

    aux_boundaries: those of the head, see `DraftModel`. packing: of the window.
    """
    batch, seen = window.shape[0], window[:, :-1]
    places = torch.arange(seen.shape[1], device=window.device).expand(batch, -1)
    attention = DenseCausal(batch)
    if packing is not None:
        places, attention = packing.positions()[:, :-1], DenseCausal(batch, packing.bias(seen.shape[1]))
    output = target(seen.reshape(-1), places.reshape(-1), attention, aux_boundaries)
    features = (output.hidden if output.aux is None else output.aux).unflatten(0, (batch, -1))
    hidden = output.hidden.unflatten(0, (batch, -1))
    return Lesson(
        batch=batch,
        tokens=seen[:, 1:].reshape(-1),
        positions=places[:, :-1].reshape(-1),
        features=features[:, :-1].flatten(0, 1),
        probs=(target.logits(hidden[:, 1:].flatten(0, 1)).float() / temperature).softmax(-1)[:, draft_ids],
        following=window[:, 2:].reshape(-1),
        temperature=temperature,
        packing=packing,
    )


def rollout(head: DraftHead, lesson: Lesson, passes: int) -> Iterator[Tensor]:
    """The draft logits float32 [batch, length, Vd] of each pass. In pass s, ignore rows below s."""
    attention = RolloutAttention(lesson.batch, lesson.packing)
    hidden = head.combine(lesson.features).to(lesson.features.dtype)  # autocast returns bfloat16
    for _ in range(passes):
        output = head(lesson.tokens, hidden, lesson.positions, attention)
        yield head.logits(output.normed).float().unflatten(0, (lesson.batch, -1))
        hidden = _down(output.feedback.unflatten(0, (lesson.batch, -1)), 1).flatten(0, 1)


def ttt_loss(head: DraftHead, lesson: Lesson, passes: int, loss: LossName = "kl") -> tuple[Tensor, Tensor]:
    """(loss, hits bool [passes, batch, length]): hits says where the head's best token is the next token.

    loss = sum over s of 0.8^s * mean over rows of `loss` between p and q_s, over the sum of the weights. Both are at
    the lesson's temperature. A token outside the draft vocabulary is a miss. With a packing only its chains count.
    """
    probs, following = (x.unflatten(0, (lesson.batch, -1)) for x in (lesson.probs, lesson.following))
    total, hits, length = probs.new_zeros(()), [], probs.shape[1]
    chains = None if lesson.packing is None else lesson.packing.chains(passes)
    for index, logits in enumerate(rollout(head, lesson, passes)):
        counted = None if chains is None else chains[index, :, : length - index]  # by the row where a chain begins
        value = counted_loss(loss, probs[:, index:], logits[:, index:] / lesson.temperature, counted)
        total = total + PASS_DECAY**index * value
        hits.append(head.target_ids(logits.argmax(-1)) == following)
    return total / sum(PASS_DECAY**index for index in range(passes)), torch.stack(hits)


def coupling(head: DraftHead, lesson: Lesson, passes: int, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(TV(p, q), P(the coupled draft is the next token)), each float32 [passes, batch, length].

    The second holds for texts that the target wrote at the lesson's temperature, see `losses.coupled_acceptance`.
    """
    probs, following = (x.unflatten(0, (lesson.batch, -1)) for x in (lesson.probs, lesson.following))
    largest = int(torch.maximum(draft_ids.max(), following.max()))
    places = draft_ids.new_full((largest + 1,), len(draft_ids))  # by target id
    places[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    drawn = places[following]
    distances, accepted = [], []
    for logits in rollout(head, lesson, passes):
        draft = (logits / lesson.temperature).softmax(-1)
        distances.append(1 - overlap(probs, draft))
        accepted.append(coupled_acceptance(probs, draft, drawn))
    return torch.stack(distances), torch.stack(accepted)


def accuracies(hits: Tensor) -> list[float]:
    """The mean of each pass over its valid rows: the share of hits, if `hits` is bool."""
    return [float(rows[:, index:].float().mean()) for index, rows in enumerate(hits)]


def by_start(hits: Tensor) -> Tensor:
    """Hits bool [passes, batch, length] by the row where a chain begins. A chain that leaves the text misses."""
    return torch.stack([F.pad(rows[:, index:], (0, index)) for index, rows in enumerate(hits)])


def chain_length(hits: Tensor) -> float:
    """Mean tokens per target forward, bonus included, of chains (topk 1) with as many steps as there are passes.

    `hits` may be the probability of each hit, if these are independent. Serving gives this length on texts that the
    target wrote itself, at any temperature.
    """
    passes, _, length = hits.shape
    chains = torch.stack([rows[:, index : length - passes + 1 + index] for index, rows in enumerate(hits)])
    return 1.0 + float(chains.float().cumprod(0).sum(0).mean())


def _down(x: Tensor, rows: int) -> Tensor:
    """Move the second-to-last dimension down by `rows`; zeros come in at the top."""
    return F.pad(x, (0, 0, rows, 0))[..., : x.shape[-2], :]
