"""Training of a block drafter (DFlash's trunk; DFlash 2's selector or DSpark's Markov edges; confidence).

A step draws anchors in texts and computes all their blocks in one pass, see `packed_blocks`. In the texts that the
target wrote the anchors lie where the target wrote, behind the prompt. The corpus, in every second step, has the longer
contexts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eagle_server.models.drafts.block import BlockConfig, BlockHead
from eagle_server.models.drafts.block_edges import CANDIDATES, EdgeConfig
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.fingerprint import weights_fingerprint
from eagle_tools.training.heads import default_boundaries, layer_keys, refuse_sizes, trainable
from eagle_tools.training.loop import Job, Schedule, train
from eagle_tools.training.losses import coupled_acceptance, overlap
from eagle_tools.training.packed_blocks import BlockScores, block_loss, block_scores, drawn_anchors
from eagle_tools.training.packing import Packing
from eagle_tools.training.recipes import BlockRecipe, EdgeName
from eagle_tools.training.redrafter import accept_length, accuracies
from eagle_tools.training.rows.row_set import RowSet
from eagle_tools.training.sources import PROMPT, OwnTexts, RowTexts, begin
from eagle_tools.training.target import evenly_spaced
from eagle_tools.training.ttt import Lesson, teach

_CONVOLUTION = (2, 16)  # DFlash 2's taps, and the channels that share a kernel
_SIZES = (  # fields of the recipe that a head to start from has
    *("layers", "block_size", "next_token", "causal", "edges", "rank", "confidence", "boundaries"),
    *("intermediate_size", "mask_token_id"),
)
_EVALUATED = 4  # texts per forward
_EVALUATED_BLOCKS = 64  # of each text


@dataclass(frozen=True)
class NewBlock:
    """A block drafter to train, and its config.json as a dict, which a loader reads."""

    head: BlockHead
    config_json: dict[str, Any]


def rarest_token(target: TargetModel, id_counts: np.ndarray) -> int:
    """The token with the smallest of `id_counts` int64 [V]. Of several it is the one with the largest embedding."""
    counts = torch.from_numpy(id_counts)
    rare = (counts == counts.min()).nonzero()[:, 0]
    norms = target.embed.detach().cpu().float().norm(dim=1)[rare]  # a row needs one
    return int(rare[norms.argmax()])


def _id_counts(target: TargetModel, data: Corpus | RowSet) -> np.ndarray:
    """How often each id is in the data, int64 [V]. Special ids of rows count as frequent."""
    if not isinstance(data, RowSet):
        return np.bincount(data.train, minlength=target.config.vocab_size)
    counts = data.counts.occurrences.copy()
    counts[sorted(data.counts.special)] += 1
    return counts


def new_block(target: TargetModel, recipe: BlockRecipe, mask_token_id: int) -> NewBlock:
    """A new head, whose edges are zero and whose convolutions are the identity."""
    if recipe.block_size < (1 if recipe.next_token else 2):
        raise ValueError(f"a block of {recipe.block_size} rows drafts nothing")
    boundaries = recipe.boundaries or default_boundaries(target.config.num_layers)
    edges: dict[EdgeName, EdgeConfig] = {
        "selector": EdgeConfig("selector", recipe.rank, candidates=CANDIDATES),
        "markov": EdgeConfig("vanilla", recipe.rank),
    }
    published = _published(target, recipe, boundaries, mask_token_id)
    config = BlockConfig(
        layers=read_target_config({**published, "architectures": []}),
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=target.config.vocab_size,
        aux_boundaries=boundaries,
        block_size=recipe.block_size,
        mask_token_id=mask_token_id,
        causal=(recipe.causal,) * recipe.layers,
        next_token=recipe.next_token,
        embed_scale=target.config.embed_scale,
        edges=edges.get(recipe.edges),
        convolution=_CONVOLUTION if recipe.edges == "selector" else None,
        confidence_rank=(recipe.rank if recipe.edges == "markov" else 0) if recipe.confidence else None,
    )
    with torch.device(target.embed.device):
        borrowed = TargetWeights(target.embed.detach(), target.lm_head)
        head = BlockHead(config, target.rope.cos.shape[0], borrowed)
    _initialize(head, target)
    return NewBlock(head, published)


def _initialize(head: BlockHead, target: TargetModel) -> None:
    """Matrices from Normal(0, 1 / sqrt(input width)); the last norm is the target's, as its lm_head is."""
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    with torch.no_grad():
        head.norm.weight.copy_(target.norm.gain)
        if head.edges is not None:
            head.edges.last_weights.zero_()
        if head.confidence is not None:
            head.confidence.weight.zero_()
            head.confidence.bias.zero_()
        for conv in (*head.attention_convs, *head.mlp_convs):
            conv.projection.weight.zero_()
            conv.base.zero_()
            conv.base[:, 0].fill_(1.0)


def _published(
    target: TargetModel, recipe: BlockRecipe, boundaries: tuple[int, ...], mask_token_id: int
) -> dict[str, Any]:
    """config.json: of DFlash 2 for a selector, else of DeepSpec's DSpark, whose markov_rank is 0 without edges."""
    flags: dict[str, float] = {"is_causal": recipe.causal, "sample_from_anchor": recipe.next_token}
    if target.config.embed_scale != 1.0:
        flags["input_embedding_scale"] = target.config.embed_scale
    places = {"target_layer_ids": [boundary - 1 for boundary in boundaries], "mask_token_id": mask_token_id}
    layers = {
        **layer_keys(target.config, recipe.intermediate_size or target.config.intermediate_size),
        "model_type": "qwen3",
        "num_hidden_layers": recipe.layers,
        "num_target_layers": target.config.num_layers,
        "block_size": recipe.block_size,
    }
    confidence = {"enable_confidence_head": recipe.confidence}
    if recipe.edges == "selector":
        taps, group = _CONVOLUTION
        selector = {"selector_rank": recipe.rank, "selector_top_k": CANDIDATES}
        convolution = {"conv_kernel_size": taps, "conv_group_size": group}
        nested = {**places, **flags, **selector, **convolution}
        return {"architectures": ["DFlash2DraftModel"], **layers, **confidence, "dflash_config": nested}
    rank = 0 if recipe.edges == "none" else recipe.rank
    markov = {"markov_rank": rank, "markov_head_type": "vanilla", "confidence_head_with_markov": rank > 0}
    return {"architectures": ["Qwen3DSparkModel"], **layers, **places, **flags, **confidence, **markov}


def existing_block(target: TargetModel, start: str | Path, recipe: BlockRecipe) -> NewBlock:
    """The block drafter of a directory or Hub id, to train it further.

    Raises:
        CheckpointError: no block drafter for this target.
        ValueError: it has what cannot be trained, or the recipe sets its sizes.
    """
    refuse_sizes(start, recipe, _SIZES)
    head, published = trainable(target, start, "DFLASH")
    assert isinstance(head, BlockHead)
    kind = "none" if head.edges is None else head.edges.kind
    if kind in ("rnn", "gru") or head.block.draft_vocab_size != target.config.vocab_size or any(head.config.windows):
        raise ValueError(f"{start}: recurrent edges, reduced vocabularies and sliding windows cannot be trained yet")
    return NewBlock(head, published)


def train_block(
    target: TargetModel, data: Corpus | RowSet, recipe: BlockRecipe, directory: Path, start: str | Path | None = None
) -> NewBlock:
    """Train a head in `directory`, or finish its training. `target` is frozen. start: see `eagle3.train_head`."""
    started = None if start is None else existing_block(target, start, recipe)
    key = None if started is None else weights_fingerprint(started.head)
    inputs, source = begin(target, data, recipe, directory, key)
    torch.manual_seed(0)
    mask = recipe.mask_token_id
    if started is None:
        new = new_block(target, recipe, rarest_token(target, _id_counts(target, data)) if mask is None else mask)
    else:
        new, recipe = started, replace(recipe, block_size=started.head.block.block_size)
    device, everything = target.embed.device, torch.arange(target.config.vocab_size, device=target.embed.device)
    lesson_of = torch.compile(teach) if recipe.compiled else teach
    loss_of = torch.compile(_step_loss) if recipe.compiled else _step_loss

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        window, packing = source.window(step)
        window, packing = window.to(device), None if packing is None else packing.to(device)
        own = packing is None and step % 2 == 1 and recipe.sampled_texts > 0
        count = max(1, recipe.anchors * window.shape[1] // recipe.length)
        with torch.autocast(device.type, torch.bfloat16):
            lesson = lesson_of(target, window, everything, new.head.aux_boundaries, packing=packing)
            first = recipe.length // 2 if own else 0  # behind the longest prompt
            anchors = drawn_anchors(lesson, first, count, recipe.block_size, step)
            return loss_of(new.head, lesson, anchors, recipe), {}

    @torch.no_grad()
    def score(window: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        lesson = teach(target, window.to(device), everything, new.head.aux_boundaries, packing=packing.to(device))
        return _score_answers(new.head, lesson, recipe)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        if isinstance(source, RowTexts):
            return source.rows.evaluate(score, every_row=False)
        return evaluate_block(target, new.head, source.corpus, source.samples, recipe)

    with warnings.catch_warnings():  # rows are bfloat16 under autocast
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        schedule, is_warm = Schedule.of(recipe.steps, recipe.peak), start is not None
        job = Job(recipe.kind, new.head, directory, schedule, loss, evaluate, inputs, warm=is_warm)
        train(replace(job, best_by=source.accept_length, accumulate=recipe.accumulate))
    return new


def _step_loss(head: BlockHead, lesson: Lesson, anchors: Tensor, recipe: BlockRecipe) -> Tensor:
    return block_loss(block_scores(head, lesson, anchors), recipe.loss, recipe.weighting, recipe.gamma)


def _score_answers(head: BlockHead, lesson: Lesson, recipe: BlockRecipe) -> tuple[Tensor, Tensor, Tensor]:
    """A `Score` of the lesson of a packed text, over some of its anchors: hits [K, 1, blocks]."""
    anchors = drawn_anchors(lesson, 0, _EVALUATED_BLOCKS, recipe.block_size, seed=0)
    scores = block_scores(head, lesson, anchors)
    assert scores.counted is not None
    right = scores.logits.argmax(-1) == scores.following
    value = block_loss(scores, recipe.loss, recipe.weighting, recipe.gamma)
    return value, right.t()[:, None], scores.counted.t()[:, None]


@torch.no_grad()
def evaluate_block(
    target: TargetModel, head: BlockHead, corpus: Corpus, samples: OwnTexts, recipe: BlockRecipe
) -> dict[str, float]:
    """The loss on held-out text; on the target's continuations of it the rates of each draft and the length of chains.

    At T = 1 the coupled rates are the chances that the target's draw is drafted with the noise of that draw. Confidence
    is compared with 1 - TV(p, q): the mean absolute error.
    """
    device, length = target.embed.device, samples.greedy.shape[1] - 1
    held_out = torch.cat(evenly_spaced(corpus.held_out, length, 24)).to(device)
    losses = [
        block_loss(scores, recipe.loss, recipe.weighting, recipe.gamma)
        for scores in _scores_of(target, head, held_out, length // 2, recipe)
    ]
    numbers = {"held-out loss": float(torch.stack(losses).mean())}
    for label, texts in (("T=0", samples.greedy), ("T=1", samples.sampled)):
        window = torch.from_numpy(texts.astype(np.int64)).to(device)
        hits, coupled, overlaps, errors = [], [], [], []
        for scores in _scores_of(target, head, window, min(PROMPT, length // 2), recipe):
            draft = scores.logits.softmax(-1)
            accepted = overlap(scores.probs, draft)
            hits.append((scores.logits.argmax(-1) == scores.following).t())
            coupled.append(coupled_acceptance(scores.probs, draft, scores.following).t())
            overlaps.append(accepted.t())
            if scores.sureness is not None:
                errors.append((scores.sureness.sigmoid() - accepted).abs().mean())
        numbers |= _rates(label, torch.cat(hits, dim=1))
        if label == "T=1":
            numbers |= _rates("T=1 coupled", torch.cat(coupled, dim=1))
            distances = accuracies(1 - torch.cat(overlaps, dim=1))
            numbers |= {f"T=1 TV step {k + 1}": distance for k, distance in enumerate(distances)}
            if errors:
                numbers["T=1 confidence error"] = float(torch.stack(errors).mean())
    return numbers


def _rates(label: str, hits: Tensor) -> dict[str, float]:
    """The mean of hits [K, blocks] of each draft, and the accept length of chains."""
    rates = {f"{label} step {k + 1}": rate for k, rate in enumerate(accuracies(hits))}
    return {**rates, f"{label} accept length": accept_length(hits)}


def _scores_of(
    target: TargetModel, head: BlockHead, window: Tensor, first: int, recipe: BlockRecipe
) -> Iterator[BlockScores]:
    """The scores of blocks from row `first` on, a few texts at a time."""
    everything = torch.arange(target.config.vocab_size, device=window.device)
    for part in window.split(_EVALUATED):
        lesson: Lesson = teach(target, part, everything, head.aux_boundaries)
        anchors = drawn_anchors(lesson, first, _EVALUATED_BLOCKS, recipe.block_size, seed=0)
        yield block_scores(head, lesson, anchors)
