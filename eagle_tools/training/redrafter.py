"""Training of a ReDrafter head: rollouts along a text, with the frozen target's distributions as labels.

At row t of a text the head reads the target's feature of t and then the tokens from t+1 on, one per step. After k
tokens its logits predict the token at t+k+1. The texts are the corpus and, in every second step, texts that the target
wrote. This is the paper's distillation (arXiv 2403.09919, section 3.3), but the label at each place is the target's
whole distribution instead of one token drawn from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.drafts.redrafter import RedrafterConfig, RedrafterHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.fingerprint import weights_fingerprint
from eagle_tools.training.heads import refuse_sizes, trainable
from eagle_tools.training.loop import Job, Schedule, train
from eagle_tools.training.packing import Packing
from eagle_tools.training.recipes import LossName, RedrafterRecipe
from eagle_tools.training.rows.row_set import RowSet
from eagle_tools.training.sources import OwnTexts, RowTexts, begin, written_part
from eagle_tools.training.target import evenly_spaced
from eagle_tools.training.ttt import Lesson, aligned_loss, by_start, counted_rows, down, teach


@dataclass(frozen=True)
class NewRedrafter:
    """A head to train, and its config.json as a dict, which a loader reads."""

    head: RedrafterHead
    config_json: dict[str, Any]


def new_redrafter(
    target: TargetModel, *, exit_dim: int | None = None, draft_layers: int = 2, rnn: bool = True
) -> NewRedrafter:
    """A new head. Its residual blocks are zero; `target` gets no aux boundaries.

    A head of the target's width starts with the target's lm_head over its feature: it predicts the target's next token.
    """
    hidden = target.config.hidden_size
    config = RedrafterConfig(target.config.vocab_size, hidden, exit_dim or 2 * hidden, draft_layers, rnn)
    with torch.device(target.embed.device):
        head = RedrafterHead(config, TargetWeights(target.embed.detach(), target.lm_head))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            nn.init.zeros_(parameter)
    for block in head.blocks:
        nn.init.zeros_(block.weight)  # type: ignore[arg-type]
    if head.input_proj is not None and config.exit_dim == hidden:
        with torch.no_grad():
            nn.init.eye_(head.input_proj.weight)
            head.lm_head.weight.copy_(target.lm_head.dense_weight())
    published = {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "exit_dim": config.exit_dim,
        "num_draft_layers": draft_layers,
        "rnn": rnn,
    }
    return NewRedrafter(head, published)


def existing_redrafter(target: TargetModel, start: str | Path, recipe: RedrafterRecipe) -> NewRedrafter:
    """The ReDrafter head of a directory or Hub id, to train it further.

    Raises:
        CheckpointError: no such head for this target.
        ValueError: the recipe sets its sizes.
    """
    refuse_sizes(start, recipe, ("exit_dim", "draft_layers", "rnn"))
    head, published = trainable(target, start, "REDRAFTER")
    assert isinstance(head, RedrafterHead)
    return NewRedrafter(head, published)


def train_redrafter(
    target: TargetModel,
    data: Corpus | RowSet,
    recipe: RedrafterRecipe,
    directory: Path,
    start: str | Path | None = None,
) -> NewRedrafter:
    """Train a head in `directory`, or finish its training. `target` is frozen. start: see `eagle3.train_head`."""
    started = None if start is None else existing_redrafter(target, start, recipe)
    key = None if started is None else weights_fingerprint(started.head)
    inputs, source = begin(target, data, recipe, directory, key)
    torch.manual_seed(0)
    new = started or new_redrafter(target, exit_dim=recipe.exit_dim, draft_layers=recipe.draft_layers, rnn=recipe.rnn)
    device = target.embed.device
    everything = torch.arange(target.config.vocab_size, device=device)
    lesson_of = torch.compile(teach) if recipe.compiled else teach
    loss_of = torch.compile(rollout_loss) if recipe.compiled else rollout_loss

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        window, packing = source.window(step)
        window, packing = window.to(device), None if packing is None else packing.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            lesson = lesson_of(target, window, everything, packing=packing)
            return loss_of(new.head, lesson, recipe.rollout, recipe.loss)[0], {}

    @torch.no_grad()
    def score(window: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        lesson = teach(target, window.to(device), everything, packing=packing.to(device))
        value, hits = rollout_loss(new.head, lesson, recipe.rollout, recipe.loss)
        return value, hits, packing.chains(recipe.rollout)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        if isinstance(source, RowTexts):
            return source.rows.evaluate(score)
        return evaluate_redrafter(target, new.head, source.corpus, source.samples, recipe.rollout)

    schedule, is_warm = Schedule.of(recipe.steps, recipe.peak), start is not None
    job = Job(recipe.kind, new.head, directory, schedule, loss, evaluate, inputs, warm=is_warm)
    train(replace(job, best_by=source.accept_length, accumulate=recipe.accumulate))
    return new


@torch.no_grad()
def evaluate_redrafter(
    target: TargetModel, head: RedrafterHead, corpus: Corpus, samples: OwnTexts, steps: int
) -> dict[str, float]:
    """The loss on held-out text; accuracy per step and accept length of chains on the target's continuations of it."""
    device, length = target.embed.device, samples.greedy.shape[1] - 1
    everything = torch.arange(target.config.vocab_size, device=device)
    held_out = torch.cat(evenly_spaced(corpus.held_out, length, 24)).to(device)
    numbers = {"held-out loss": float(rollout_loss(head, teach(target, held_out, everything), steps)[0])}
    for label, texts in (("T=0", samples.greedy), ("T=1", samples.sampled)):
        window = torch.from_numpy(texts.astype(np.int64)).to(device)
        _, hits = rollout_loss(head, teach(target, window, everything), steps)
        written = written_part(hits, length)
        numbers |= {f"{label} step {k + 1}": rate for k, rate in enumerate(accuracies(written))}
        numbers[f"{label} accept length"] = accept_length(written)
    return numbers


def rollout(head: RedrafterHead, lesson: Lesson, steps: int) -> Iterator[Tensor]:
    """The logits [batch * rows, V] of each step, for every row of a text with at least `steps` tokens after it.

    With a packing for all rows of a window, whose chains say what counts.
    """
    for read in _read(head, lesson, steps):
        yield head.logits(*read.flatten(0, 1).chunk(2, dim=-1))


def _read(head: RedrafterHead, lesson: Lesson, steps: int) -> Iterator[Tensor]:
    """What each step makes its logits of, the context and the state of each row: [batch, rows, 2 * H]."""
    tokens, features = (x.unflatten(0, (lesson.batch, -1)) for x in (lesson.tokens, lesson.features))
    if lesson.packing is not None:
        tokens = F.pad(tokens, (0, steps - 1))
    rows = tokens.shape[1] - steps + 1
    context, state = features[:, :rows], None
    for step in range(steps):
        state = head.state(tokens[:, step : step + rows].flatten(), state)
        yield torch.cat([context, state.unflatten(0, (lesson.batch, rows))], dim=-1)


def rollout_loss(head: RedrafterHead, lesson: Lesson, steps: int, loss: LossName = "kl") -> tuple[Tensor, Tensor]:
    """(loss, hits bool [steps, batch, rows]): hits says where the head's best token is the next token.

    The loss is that of `aligned_loss`. With a packing only its chains count.
    """
    length = len(lesson.tokens) // lesson.batch
    read = list(_read(head, lesson, steps))
    rows = read[0].shape[1]
    moved = [down(F.pad(each, (0, 0, 0, length - rows)), step).flatten(0, 1) for step, each in enumerate(read)]
    counted = counted_rows(lesson, steps)
    if lesson.packing is None:  # chains that leave the text do not count
        places = torch.arange(length, device=counted.device).repeat(lesson.batch)
        counted = counted & torch.stack([places < rows + step for step in range(steps)])
    total, best = aligned_loss(lesson, moved, counted, lambda _, each: head.logits(*each.chunk(2, dim=-1)), loss)
    right = (best == lesson.following).unflatten(1, (lesson.batch, -1))
    return total, by_start(right)[..., :rows]


def accuracies(hits: Tensor) -> list[float]:
    """The share of hits in each step."""
    return [float(rows.float().mean()) for rows in hits]


def accept_length(hits: Tensor) -> float:
    """Mean tokens per target forward, bonus included, of chains with one step per row of `hits`.

    `hits` may be the probability of each hit, see `ttt.chain_length`.
    """
    return 1.0 + float(hits.float().cumprod(0).sum(0).mean())
