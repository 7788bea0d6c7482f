"""Training of Medusa-1 heads: all heads learn together from the last hidden state of a frozen target.

    loss = sum over heads i of 0.8^i * mean over positions t of -sum over v of p(v) log q_i(v), over the sum of weights

or with another of `losses` in place of the cross-entropy. q_i is head i's distribution at t, and p the target's
distribution of the token at t + 2 + i, given the text before it. The Medusa paper's cross-entropy has p = 1 at the
token that came. Its mean over texts is the same, but noisier.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.drafts.medusa import MedusaConfig, MedusaHeads
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.fingerprint import weights_fingerprint
from eagle_tools.training.heads import refuse_sizes, trainable
from eagle_tools.training.loop import Job, Schedule, train
from eagle_tools.training.packing import Packing
from eagle_tools.training.recipes import LossName, MedusaRecipe
from eagle_tools.training.rows.row_set import RowSet
from eagle_tools.training.sources import OwnTexts, RowTexts, begin, written_part
from eagle_tools.training.target import evenly_spaced
from eagle_tools.training.ttt import Lesson, accuracies, aligned_loss, by_start, chain_length, counted_rows, down, teach

FILE = "medusa_lm_head.safetensors"
_EVALUATED = 8  # texts per forward


def new_heads(target: TargetModel, heads: int, layers: int, *, shared_lm_head: bool = False) -> MedusaHeads:
    """New heads with zero residual blocks and the target's lm_head: each predicts the target's next token at first."""
    config = MedusaConfig(heads, layers, target.config.hidden_size, target.config.vocab_size, not shared_lm_head)
    with torch.device(target.embed.device):
        model = MedusaHeads(config, TargetWeights(target.embed.detach(), target.lm_head))
    lm_head = target.lm_head.dense_weight().detach()
    with torch.no_grad():
        for name, view in model.weight_views():
            if name.endswith(f".{layers}.weight"):
                view.copy_(lm_head)
            else:
                view.zero_()
    return model


def medusa_loss(model: MedusaHeads, lesson: Lesson, loss: LossName = "kl") -> tuple[Tensor, Tensor]:
    """(loss, hits bool [heads, batch, length]), as of `ttt_loss`: head i at row t - i predicts the token at t + 2."""
    heads, batch = model.config.heads, lesson.batch
    states = model.states(lesson.features).unflatten(1, (batch, -1))
    steps = [down(each, i).flatten(0, 1) for i, each in enumerate(states)]
    total, best = aligned_loss(lesson, steps, counted_rows(lesson, heads), model.head_logits, loss)
    return total, (best == lesson.following).unflatten(1, (batch, -1))


def existing_medusa(target: TargetModel, start: str | Path, recipe: MedusaRecipe) -> MedusaHeads:
    """The Medusa heads of a directory or Hub id, to train them further.

    Raises:
        CheckpointError: no Medusa heads for this target.
        ValueError: the recipe sets their sizes.
    """
    refuse_sizes(start, recipe, ("heads", "layers", "shared_lm_head"))
    model, _ = trainable(target, start, "MEDUSA")
    assert isinstance(model, MedusaHeads)
    return model


def train_medusa(
    target: TargetModel, data: Corpus | RowSet, recipe: MedusaRecipe, directory: Path, start: str | Path | None = None
) -> MedusaHeads:
    """Train heads in `directory`, or finish their training. `target` is frozen. start: see `eagle3.train_head`."""
    started = None if start is None else existing_medusa(target, start, recipe)
    inputs, source = begin(target, data, recipe, directory, None if started is None else weights_fingerprint(started))
    model = started or new_heads(target, recipe.heads, recipe.layers, shared_lm_head=recipe.shared_lm_head)
    device = target.embed.device
    narrow = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()  # other CPUs emulate bfloat16
    everything = torch.arange(target.config.vocab_size, device=device)
    lesson_of = torch.compile(teach) if recipe.compiled else teach
    loss_of = torch.compile(medusa_loss) if recipe.compiled else medusa_loss

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        window, packing = source.window(step)
        window, packing = window.to(device), None if packing is None else packing.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            return loss_of(model, lesson_of(target, window, everything, packing=packing), recipe.loss)[0], {}

    @torch.no_grad()
    def score(window: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        lesson = teach(target, window.to(device), everything, packing=packing.to(device))
        value, hits = medusa_loss(model, lesson, recipe.loss)
        return value, by_start(hits), packing.chains(model.config.heads)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        if isinstance(source, RowTexts):
            return source.rows.evaluate(score)
        return evaluate_medusa(target, model, source.corpus, source.samples)

    schedule = Schedule.of(recipe.steps, recipe.peak)
    job = Job("medusa", model, directory, schedule, loss, evaluate, inputs, warm=start is not None)
    train(replace(job, best_by=source.accept_length, accumulate=recipe.accumulate))
    return model


@torch.no_grad()
def evaluate_medusa(target: TargetModel, model: MedusaHeads, corpus: Corpus, samples: OwnTexts) -> dict[str, float]:
    """The loss on held-out text; each head's accuracy and the accept length of chains on the target's own texts."""
    device, length = target.embed.device, samples.greedy.shape[1] - 1
    held_out = torch.cat(evenly_spaced(corpus.held_out, length, 24)).to(device)
    everything = torch.arange(target.config.vocab_size, device=device)
    losses = [medusa_loss(model, teach(target, part, everything))[0] for part in held_out.split(_EVALUATED)]
    numbers = {"held-out loss": float(torch.stack(losses).mean())}
    for label, texts in (("T=0", samples.greedy), ("T=1", samples.sampled)):
        window = torch.from_numpy(texts.astype(np.int64)).to(device)
        parts = [medusa_loss(model, teach(target, part, everything))[1] for part in window.split(_EVALUATED)]
        written = written_part(torch.cat(parts, dim=1), length)
        for index, accuracy in enumerate(accuracies(written)):
            numbers[f"{label} head {index + 1}"] = accuracy
        numbers[f"{label} accept length"] = chain_length(written)
    return numbers


def export_medusa(model: MedusaHeads, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write trained heads in the format of Medusa-1: config.json and medusa_lm_head.safetensors."""
    config = model.config
    described = {
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    save_checkpoint(model, directory, described, dtype, file=FILE)
