"""Training-time test (EAGLE-3, arXiv 2503.01840): a head is trained on its own feedback, as in serving.

Row t has the token at t+1 and the feature of t, at RoPE position t, and predicts the token at t+2. In pass 0 the
features are the target's. In pass s, row t is step s of a chain that started from the target's feature of row t-s. The
feature of row t is then the feedback of row t-1 in pass s-1; tokens and positions stay. So S passes train S steps of
the chains that begin at every row of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.captured_target import output_of
from eagle_tools.training.losses import combined_loss, coupled_acceptance, overlap, row_losses
from eagle_tools.training.packing import Packing
from eagle_tools.training.recipes import LossName
from eagle_tools.training.text_attention import TextAttention, by_text, in_blocks, recomputed

LogitsOf = Callable[[int, Tensor], Tensor]  # (step, rows) -> logits [rows, Vd]
PASS_DECAY = 0.8
KEPT = 1 << 26  # logits; what is more is computed again in the backward pass, not kept
CHUNK = 512  # rows of which distributions over the vocabulary exist at a time


class RolloutAttention(BoundAttention):
    """A `BoundAttention` for all passes over `batch` sequences of one length. It keeps the keys of earlier passes.

    In pass s, row t sees the keys of pass 0 at rows 0..t-s (the prefix), and those of pass j at row t-s+j for j = 1..s
    (its own chain, itself included). The chains of rows t < s begin before the text: their values stay finite, and no
    valid row sees them.

    packing: documents that do not see each other; None: each sequence is one.
    """

    def __init__(self, batch: int, packing: Packing | None = None) -> None:
        self.batch, self.packing = batch, packing
        self._passes: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: k, v [batch, kv_heads, length, head_dim]

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """q, k [batch * length, heads or kv_heads, head_dim], v [.., kv_heads, value_dim] -> [.., heads, value_dim]."""
        passes = self._passes.setdefault(layer.index, [])
        keys, values = (by_text(x, self.batch) for x in (k, v))
        passes.append((keys, values))
        last = len(passes) - 1
        if last == 0:
            return TextAttention(self.batch, self.packing).run(q, k, v, layer)
        chain = [(down(a, last - j), down(b, last - j)) for j, (a, b) in enumerate(passes) if j > 0]
        return in_blocks(q, passes[0], chain, self.packing, layer)


@dataclass(frozen=True)
class Teacher:
    """The target's distributions for the rows of a lesson. They are computed when they are asked for.

    So no tensor of all rows times the vocabulary has to exist.
    """

    target: TargetModel
    hidden: Tensor  # [rows, H], the target's last hidden state of the token at t+1
    draft_ids: Tensor  # int64 [Vd]
    temperature: float

    @torch.no_grad()
    def probs(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Of the token at t+2, restricted to the draft vocabulary: float32 [chosen rows, Vd]."""
        return (self.target.logits(self.hidden[rows]).float() / self.temperature).softmax(-1)[:, self.draft_ids]


@dataclass(frozen=True)
class Lesson:
    """A batch of texts, and what the target makes of it. Rows are [batch * length]."""

    batch: int
    tokens: Tensor  # int64 [rows], the token at t+1
    positions: Tensor  # int64 [rows]
    features: Tensor  # [rows, n * Ht], of t
    teacher: Teacher
    following: Tensor  # int64 [rows], the token at t+2
    packing: Packing | None = None  # of the window; None: each text is one document, and all of it counts

    @property
    def probs(self) -> Tensor:
        """All of the teacher's distributions, float32 [rows, Vd]."""
        return self.teacher.probs()


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
    if packing is not None:
        places = packing.positions()[:, :-1]
    output = output_of(target, seen, places, packing, aux_boundaries)
    features = (output.hidden if output.aux is None else output.aux).unflatten(0, (batch, -1))
    hidden = output.hidden.unflatten(0, (batch, -1))
    return Lesson(
        batch=batch,
        tokens=seen[:, 1:].reshape(-1),
        positions=places[:, :-1].reshape(-1),
        features=features[:, :-1].flatten(0, 1),
        teacher=Teacher(target, hidden[:, 1:].flatten(0, 1), draft_ids, temperature),
        following=window[:, 2:].reshape(-1),
        packing=packing,
    )


def rollout(head: DraftHead, lesson: Lesson, passes: int) -> Iterator[Tensor]:
    """The draft logits float32 [batch, length, Vd] of each pass. In pass s, ignore rows below s."""
    for normed in _rolled(head, lesson, passes):
        yield head.logits(normed).float().unflatten(0, (lesson.batch, -1))


def _rolled(head: DraftHead, lesson: Lesson, passes: int) -> Iterator[Tensor]:
    """The input of the lm_head [batch * length, H] of each pass."""
    attention = RolloutAttention(lesson.batch, lesson.packing)
    hidden = head.combine(lesson.features).to(lesson.features.dtype)  # autocast returns bfloat16
    begins = _document_begins(lesson)
    for level in range(passes):
        output = head.draft(level, lesson.tokens, hidden, lesson.positions, attention)
        yield output.normed
        moved = down(output.feedback.unflatten(0, (lesson.batch, -1)), 1)
        hidden = (moved if begins is None else moved.masked_fill(begins, 0.0)).flatten(0, 1)


def _document_begins(lesson: Lesson) -> Tensor | None:
    """Which rows are the first of a document, bool [batch, length, 1]; None: those with zeros already.

    Several MTP layers read zeros there: their keys in a text's first rows are seen by all later rows.
    """
    if lesson.packing is None:
        return None
    documents = lesson.packing.documents[:, : len(lesson.tokens) // lesson.batch]
    return (F.pad(documents[:, :-1], (1, 0), value=-2) != documents)[..., None]


def ttt_loss(head: DraftHead, lesson: Lesson, passes: int, loss: LossName = "kl") -> tuple[Tensor, Tensor]:
    """(loss, hits bool [passes, batch, length]): hits says where the head's best token is the next token.

    The loss is that of `aligned_loss`, p and q at the lesson's temperature. A token outside the draft vocabulary is a
    miss. With a packing only its chains count.
    """
    normed = list(_rolled(head, lesson, passes))
    counted = counted_rows(lesson, passes)
    total, best = aligned_loss(lesson, normed, counted, lambda _, rows: head.logits(rows), loss)
    hits = head.target_ids(best) == lesson.following
    return total, hits.unflatten(1, (lesson.batch, -1))


def aligned_loss(
    lesson: Lesson, steps: Sequence[Tensor], counted: Tensor, logits_of: LogitsOf, loss: LossName
) -> tuple[Tensor, Tensor]:
    """(loss, the draft's best ids [steps, batch * length]), of rows that lie where the token is that they predict.

    loss = sum over s of 0.8^s * mean over the rows that count of `loss` between p and q_s, over the sum of the weights;
    0 for a step of which none counts. Logits exist for some rows at a time.

    steps: of which `logits_of` makes logits, each [batch * length, *]. counted: bool [steps, batch * length].
    """
    places = counted.long().cumsum(1) - 1  # each row's number among those that count, which `coupled` draws by
    large = counted.numel() * len(lesson.teacher.draft_ids) > KEPT
    values, best = [], []
    for start in range(0, len(lesson.tokens), CHUNK):
        rows = slice(start, start + CHUNK)
        chunk = partial(_chunk_losses, logits_of, lesson.teacher, loss, rows)
        found = recomputed(chunk, places[:, rows], *(each[rows] for each in steps), large=large)
        values.append(found[0])
        best.append(found[1])
    kept = torch.where(counted[..., None], torch.cat(values, dim=1), 0.0)
    means = kept.sum(1) / counted.sum(1, keepdim=True).clamp_min(1)  # [steps, terms]
    total = sum((PASS_DECAY**s * combined_loss(loss, mean) for s, mean in enumerate(means)), means.new_zeros(()))
    return total / sum(PASS_DECAY**index for index in range(len(steps))), torch.cat(best, dim=1)


def counted_rows(lesson: Lesson, passes: int) -> Tensor:
    """Which rows count in each pass, bool [passes, batch * length]. Without a packing these are rows s.. in pass s."""
    length = len(lesson.tokens) // lesson.batch
    if lesson.packing is None:
        begins = lesson.tokens.new_ones(passes, lesson.batch, length, dtype=torch.bool)
    else:
        begins = lesson.packing.chains(passes)
    moved = [F.pad(rows, (index, 0))[:, :length] for index, rows in enumerate(begins)]
    return torch.stack(moved).flatten(1)


def _chunk_losses(
    logits_of: LogitsOf, teacher: Teacher, loss: LossName, rows: slice, places: Tensor, *steps: Tensor
) -> tuple[Tensor, Tensor]:
    """(the terms of the loss of some rows, float32 [steps, rows, terms]; the draft's best ids [steps, rows])."""
    probs, values, best = teacher.probs(rows), [], []
    for index, each in enumerate(steps):
        logits = logits_of(index, each).float()
        values.append(row_losses(loss, probs, logits / teacher.temperature, places[index]))
        best.append(logits.argmax(-1))
    return torch.stack(values), torch.stack(best)


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
        draft = (logits / lesson.teacher.temperature).softmax(-1)
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


def down(x: Tensor, rows: int) -> Tensor:
    """Move the second-to-last dimension down by `rows`; zeros come in at the top."""
    return F.pad(x, (0, 0, rows, 0))[..., : x.shape[-2], :]
