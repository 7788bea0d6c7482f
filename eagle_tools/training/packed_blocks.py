"""Many blocks of one text in one pass of a block drafter (DFlash, arXiv 2602.06036), and its loss.

A block has an anchor: the row r of a lesson, whose token stands at r + 1 and is the block's root. The rows of a block
stand at r + 1, r + 2, ..., and see the context's features up to r and their own block. So a block computes what serving
computes for a context of r + 1 tokens. Draft k = 0, 1, ... is the token at r + 2 + k, whose distribution the lesson has
in row r + k.

Scores are teacher-forced: the edges get the text's own token before each draft. A chain has these tokens as long as all
of it is accepted, so accept lengths of chains follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.drafts.block import BlockAttention, BlockHead
from eagle_tools.training.losses import draft_loss, overlap, weighted_mean
from eagle_tools.training.packing import Packing
from eagle_tools.training.recipes import LossName, Weighting
from eagle_tools.training.ttt import Lesson

_LOWEST = -1e4  # finite, so that 0 probability times a forbidden token's logit is 0
_DPACE_FLOOR = 0.5  # alpha of arXiv 2605.18810


class PackedBlocks(BoundAttention):
    """Attention of the rows of all blocks of a batch of texts.

    Args:
        anchors: int64 [batch, blocks].
        contexts: keys and values of the texts' rows, [batch * length, kv_heads, head_dim] by layer.
        causal: whether a row sees only the rows of its block before it, and itself.
        packing: of the texts; None: each is one document.
    """

    def __init__(
        self,
        anchors: Tensor,
        contexts: Mapping[int, tuple[Tensor, Tensor]],
        *,
        causal: bool,
        packing: Packing | None = None,
    ) -> None:
        self.anchors, self.contexts, self.causal, self.packing = anchors, contexts, causal, packing

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """q, k, v [batch * blocks * rows, heads or kv_heads, head_dim] -> [.., heads, head_dim]."""
        batch, blocks = self.anchors.shape
        queries, keys, values = (x.unflatten(0, (batch, blocks, -1)).transpose(2, 3) for x in (q, k, v))
        queries = queries.unflatten(2, (k.shape[1], -1)).permute(0, 2, 1, 3, 4, 5)  # [b, kv_heads, blocks, g, rows, d]
        keys, values = (x.transpose(1, 2)[:, :, :, None] for x in (keys, values))  # [b, kv_heads, blocks, 1, rows, d]
        context_k, context_v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in self.contexts[layer.index])
        length, rows = context_k.shape[2], queries.shape[4]
        seen = torch.arange(length, device=q.device) <= self.anchors[:, None, :, None, None, None]
        if self.packing is not None:
            documents = self.packing.documents
            own = (
                documents[:, None, :length] == documents.gather(1, self.anchors)[:, :, None]
            )  # [batch, blocks, length]
            seen = seen & own[:, None, :, None, None]
        scores = (queries.flatten(2, 4) @ context_k.transpose(-1, -2)).unflatten(2, queries.shape[2:5])
        block = queries @ keys.transpose(-1, -2)
        if self.causal:
            block = block.masked_fill(block.new_ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
        joined = torch.cat([scores.masked_fill(~seen, -torch.inf), block], dim=-1)
        weights = (joined.float() * layer.scale).softmax(-1).to(values.dtype)
        out = (weights[..., :length].flatten(2, 4) @ context_v).unflatten(2, queries.shape[2:5])
        mixed: Tensor = (out + weights[..., length:] @ values).permute(0, 2, 4, 1, 3, 5)
        return mixed.reshape(q.shape)


def drawn_anchors(lesson: Lesson, first: int, count: int, rows: int, seed: int) -> Tensor:
    """`count` different anchors per text, or all that there are: int64 [batch, blocks], from row `first` on.

    rows: of a block, which must end inside the text. With a packing the anchors whose first draft counts come first.
    """
    places = len(lesson.tokens) // lesson.batch - rows - first + 1
    if places < 1:
        raise ValueError(
            f"a text of {places + rows + first - 1} rows is too short for blocks of {rows} from row {first} on"
        )
    draw = torch.Generator().manual_seed(seed)
    ranks = torch.rand(lesson.batch, places, generator=draw)
    if lesson.packing is not None:
        ranks += ~lesson.packing.chains(1)[0, :, first : first + places].cpu()
    order = ranks.argsort(dim=1)
    return order[:, :count].sort(dim=1).values.to(lesson.tokens.device) + first


@dataclass(frozen=True)
class BlockScores:
    """The scores of all drafts of all blocks, and what the target says of them. Rows are [batch * blocks].

    base: without edges. logits: with those of the text's token before each draft.
    """

    base: Tensor  # float32 [rows, K, V]
    logits: Tensor  # float32 [rows, K, V]
    sureness: Tensor | None  # float32 [rows, K], the confidence head's logits
    chosen: Tensor | None  # float32 [rows, K, C], a selector's scores of the best tokens, one of which is `following`
    chosen_place: Tensor | None  # int64 [rows, K], the place of `following` there
    probs: Tensor  # float32 [rows, K, V], 0 for the mask token
    following: Tensor  # int64 [rows, K]
    counted: Tensor | None = None  # bool [rows, K], the drafts that are trained; None: all


def block_rows(head: BlockHead, lesson: Lesson, anchors: Tensor) -> Tensor:
    """`BlockHead.rows` y [batch * blocks, rows, H] of the blocks with anchors int64 [batch, blocks]."""
    rows = head.block.block_size
    contexts = {index: (k, v) for index, k, v in head.context_kv(lesson.features, lesson.positions)}
    kinds = {causal: PackedBlocks(anchors, contexts, causal=causal, packing=lesson.packing) for causal in (True, False)}
    begins = _at(lesson, lesson.positions, anchors).flatten()
    positions = begins[:, None] + 1 + torch.arange(rows, device=anchors.device)
    roots = _at(lesson, lesson.tokens, anchors).flatten()
    return head.rows(roots, positions, BlockAttention(lambda: kinds[True], lambda: kinds[False], rows))


def block_scores(head: BlockHead, lesson: Lesson, anchors: Tensor) -> BlockScores:
    """The scores of the blocks with anchors int64 [batch, blocks]."""
    y = block_rows(head, lesson, anchors)[:, head.first_draft :]
    drafts = anchors[:, :, None] + torch.arange(y.shape[1], device=anchors.device)  # rows of the lesson
    parents, following = (_at(lesson, x, drafts).flatten(0, 1) for x in (lesson.tokens, lesson.following))
    rows = _rows_of(lesson, drafts)
    probs = lesson.teacher.probs(rows.flatten()).unflatten(0, following.shape)
    base = head.logits(y.flatten(0, 1)).float()
    base[:, head.block.mask_token_id] = _LOWEST
    probs[:, :, head.block.mask_token_id] = 0  # no draft: its mass is lost
    logits, chosen, place = base, None, None
    if head.edges is not None:
        if head.edges.kind == "rnn":
            raise ValueError("recurrent Markov heads cannot be trained yet")
        below, before = y.flatten(0, 1), parents.flatten()[:, None]
        if head.edges.kind == "selector":
            kept = base.detach().topk(min(head.edges.candidates, base.shape[1]), dim=1).indices
            logits = base.scatter_add(1, kept, head.edges(below, before, kept[:, None], None)[0][:, 0])
            kept, place = _with(kept, following.flatten())
            chosen = base.gather(1, kept) + head.edges(below, before, kept[:, None], None)[0][:, 0]
            chosen, place = (x.unflatten(0, following.shape) for x in (chosen, place))
        else:
            logits = base + head.edges.to_all(below, before, None)[0][:, 0].float()
    sureness = None
    if head.confidence is not None:
        sureness = head.confidence_logits(y.flatten(0, 1), parents.flatten()[:, None]).float().view(following.shape)
    return BlockScores(
        base=base.unflatten(0, following.shape),
        logits=logits.unflatten(0, following.shape),
        sureness=sureness,
        chosen=chosen,
        chosen_place=place,
        probs=probs,
        following=following,
        counted=None if lesson.packing is None else _counted(lesson.packing, anchors, y.shape[1]),
    )


def _counted(packing: Packing, anchors: Tensor, drafts: int) -> Tensor:
    """Whether each draft of the blocks with anchors int64 [batch, blocks] counts, bool [batch * blocks, drafts]."""
    return torch.stack([chain.gather(1, anchors).flatten() for chain in packing.chains(drafts)], dim=1)


def block_loss(scores: BlockScores, loss: LossName, weighting: Weighting, gamma: float) -> Tensor:
    """`loss` of the scores, plus a selector's choice and the confidence against 1 - TV(p, q); a scalar."""
    weights = row_weights(scores, weighting, gamma)
    if scores.counted is not None:
        weights = weights * scores.counted
        if not scores.counted.any():
            return scores.logits.sum() * 0.0
    total = draft_loss(loss, scores.probs, scores.base if scores.chosen is not None else scores.logits, weights)
    if scores.chosen is not None and scores.chosen_place is not None:
        chosen = F.cross_entropy(scores.chosen.transpose(1, 2), scores.chosen_place, reduction="none")
        total = total + weighted_mean(chosen, weights)
    if scores.sureness is not None:
        accepted = overlap(scores.probs, scores.logits.detach().softmax(-1))
        confidence = F.binary_cross_entropy_with_logits(scores.sureness, accepted, reduction="none")
        total = total + weighted_mean(confidence, weights)
    return total


@torch.no_grad()
def row_weights(scores: BlockScores, weighting: Weighting, gamma: float) -> Tensor:
    """The weights of the drafts in the loss, float32 [rows, K].

    decay: exp(-k / gamma). dpace (arXiv 2605.18810): the expected number of drafts from k on that a chain accepts, with
    (1 - alpha) q(y) + alpha for the chance of each.
    """
    shape = scores.following.shape
    if weighting == "decay":
        return torch.exp(-torch.arange(shape[1], device=scores.logits.device) / gamma).expand(shape)
    right = scores.logits.log_softmax(-1).gather(-1, scores.following[..., None])[..., 0].exp()
    reached = ((1 - _DPACE_FLOOR) * right + _DPACE_FLOOR).cumprod(1)
    return reached.flip(1).cumsum(1).flip(1)


def _with(kept: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """kept int64 [rows, C] with `token` int64 [rows] in the last place where it is missing, and its places."""
    found = kept == token[:, None]
    last = torch.where(found.any(1), kept[:, -1], token)
    kept = torch.cat([kept[:, :-1], last[:, None]], dim=1)
    return kept, (kept == token[:, None]).int().argmax(1)


def _at(lesson: Lesson, values: Tensor, rows: Tensor) -> Tensor:
    """The rows int64 [batch, ...] of each text of `values` [batch * length, ...]: [*rows.shape, ...]."""
    return values[_rows_of(lesson, rows)]


def _rows_of(lesson: Lesson, rows: Tensor) -> Tensor:
    """The rows int64 [batch, ...] of each text as rows of the lesson."""
    length = len(lesson.tokens) // lesson.batch
    starts = torch.arange(lesson.batch, device=rows.device) * length
    return rows + starts.view(-1, *[1] * (rows.dim() - 1))
