"""Training of a draft head for a frozen target: on a corpus, and on texts that the target wrote."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.fingerprint import weights_fingerprint
from eagle_tools.training.heads import (
    NewHead,
    default_boundaries,
    existing_head,
    new_eagle,
    new_eagle3,
    refuse_sizes,
)
from eagle_tools.training.loop import Job, Schedule, train
from eagle_tools.training.packing import Packing
from eagle_tools.training.recipes import Recipe
from eagle_tools.training.rows.row_set import RowSet
from eagle_tools.training.sources import OwnTexts, RowTexts, begin, written_part
from eagle_tools.training.target import evenly_spaced
from eagle_tools.training.token_counts import WANTED_COVERAGE, TokenCounts
from eagle_tools.training.ttt import accuracies, by_start, chain_length, coupling, teach, ttt_loss


def train_head(
    target: TargetModel,
    data: Corpus | RowSet,
    recipe: Recipe,
    directory: Path,
    start: str | Path | None = None,
    target_path: str | Path | None = None,
) -> NewHead:
    """Train a head in `directory`, or finish its training. `target` is frozen.

    start: a checkpoint directory or Hub id to train on from, which has the head's shape; None: a new head, which MTP
        layers cannot be. target_path: of the target's files, where `start` may be them.

    Raises:
        ValueError: too little text, another training in `directory`, or `start` is not what the recipe says.
        CheckpointError: `start` is no head for this target.
    """
    started = None if start is None else _started(target, recipe, start, target_path)
    key = None if started is None else weights_fingerprint(started.head)
    inputs, source = begin(target, data, recipe, directory, key)
    torch.manual_seed(0)
    new = started or _fresh(target, data, recipe)
    draft_ids, device = new.draft_ids(), target.embed.device
    if isinstance(data, RowSet):
        print(_coverage(data.counts, draft_ids))
    lesson_of = torch.compile(teach) if recipe.compiled else teach
    loss_of = torch.compile(ttt_loss) if recipe.compiled else ttt_loss

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        window, packing = source.window(step)
        window, packing = window.to(device), None if packing is None else packing.to(device)
        temperature = recipe.temperatures[step // 2 % len(recipe.temperatures)]  # for each kind of text
        with torch.autocast(device.type, torch.bfloat16):
            lesson = lesson_of(target, window, draft_ids, new.head.aux_boundaries, temperature, packing)
            return loss_of(new.head, lesson, recipe.passes, recipe.loss)[0], {}

    @torch.no_grad()
    def score(window: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        lesson = teach(target, window.to(device), draft_ids, new.head.aux_boundaries, packing=packing.to(device))
        value, hits = ttt_loss(new.head, lesson, recipe.passes, recipe.loss)
        return value, by_start(hits), packing.chains(recipe.passes)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        if isinstance(source, RowTexts):
            return source.rows.evaluate(score)
        return evaluate_head(target, new, source.corpus, source.samples, recipe.passes)

    with warnings.catch_warnings():  # the residual stream of an EAGLE-1 head is bfloat16 under autocast
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        schedule, is_warm = Schedule.of(recipe.steps, recipe.peak), start is not None
        job = Job(recipe.kind, new.head, directory, schedule, loss, evaluate, inputs, warm=is_warm)
        train(replace(job, best_by=source.accept_length, accumulate=recipe.accumulate))
    return new


@torch.no_grad()
def evaluate_head(
    target: TargetModel, new: NewHead, corpus: Corpus, samples: OwnTexts, passes: int
) -> dict[str, float]:
    """The cross-entropy on held-out text, and how well the head drafts on the target's continuations of it.

    Those are accuracy per pass and accept length of chains; at T=1 also TV(p, q) and the accept length of chains that
    are drafted with the noise of the target's draws ("coupled").
    """
    draft_ids, device, numbers = new.draft_ids(), target.embed.device, {}
    boundaries = new.head.aux_boundaries
    length = samples.greedy.shape[1] - 1
    held_out = torch.cat(evenly_spaced(corpus.held_out, length, 24)).to(device)
    numbers["held-out loss"] = float(ttt_loss(new.head, teach(target, held_out, draft_ids, boundaries), passes)[0])
    for label, texts in (("T=0", samples.greedy), ("T=1", samples.sampled)):
        window = torch.from_numpy(texts.astype(np.int64)).to(device)
        lesson = teach(target, window, draft_ids, boundaries)
        _, hits = ttt_loss(new.head, lesson, passes)
        written = written_part(hits, length)
        for index, accuracy in enumerate(accuracies(written)):
            numbers[f"{label} step {index + 1}"] = accuracy
        numbers[f"{label} accept length"] = chain_length(written)
    distances, accepted = (written_part(rates, length) for rates in coupling(new.head, lesson, passes, draft_ids))
    for index, (distance, rate) in enumerate(zip(accuracies(distances), accuracies(accepted), strict=True)):
        numbers[f"T=1 TV step {index + 1}"] = distance
        numbers[f"T=1 coupled step {index + 1}"] = rate
    numbers["T=1 coupled accept length"] = chain_length(accepted)
    return numbers


def _fresh(target: TargetModel, data: Corpus | RowSet, recipe: Recipe) -> NewHead:
    width = recipe.intermediate_size or target.config.intermediate_size
    if recipe.kind == "eagle":
        return new_eagle(target, width)
    boundaries = recipe.boundaries or default_boundaries(target.config.num_layers)
    return new_eagle3(target, boundaries, _draft_ids(target, data, recipe), width)


def _draft_ids(target: TargetModel, data: Corpus | RowSet, recipe: Recipe) -> Tensor:
    """The draft vocabulary of a new head, sorted int64 [Vd]."""
    vocab = target.config.vocab_size
    count = min(vocab, recipe.draft_vocab or vocab)
    counts = data.counts if isinstance(data, RowSet) else TokenCounts.of([data.train], vocab)
    return counts.draft_ids(count)


def _coverage(counts: TokenCounts, draft_ids: Tensor) -> str:
    """How much of the rows a head can draft, and the size that would be enough."""
    vocab = f"draft vocabulary: {len(draft_ids)} of {counts.vocab} tokens"
    covered = f"{100 * counts.coverage(draft_ids):.2f} % of what is trained on"
    enough = f"{100 * WANTED_COVERAGE} % takes {counts.size_for(WANTED_COVERAGE)}, chosen by these rows"
    return f"{vocab}, {covered}; {enough}"


def _started(target: TargetModel, recipe: Recipe, start: str | Path, target_path: str | Path | None) -> NewHead:
    refuse_sizes(start, recipe, ("draft_vocab", "intermediate_size", "boundaries"))
    return existing_head(target, start, recipe.kind, target_path)
