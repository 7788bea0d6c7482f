"""Training of a draft head for a frozen target: on a corpus, and on texts that the target wrote."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.fingerprint import (
    cached_arrays,
    claim,
    fingerprint,
    save_arrays,
    training_inputs,
    weights_fingerprint,
)
from eagle_tools.training.generate import TextSampling, target_texts
from eagle_tools.training.heads import (
    NewHead,
    default_boundaries,
    existing_head,
    frequent_ids,
    new_eagle,
    new_eagle3,
)
from eagle_tools.training.loop import Job, Schedule, train
from eagle_tools.training.recipes import Recipe
from eagle_tools.training.target import TOKENS_PER_STEP, evenly_spaced, windows
from eagle_tools.training.ttt import accuracies, chain_length, coupling, teach, ttt_loss

_OWN_TEXTS = "own-texts.npz"
PROMPT = 64  # prompt tokens of the texts that the target writes for evaluation


def at_most(texts: int, window: Tensor, length: int) -> Tensor:
    """The first texts of `window` [batch, longer + 1], with at most `texts` * `length` tokens together."""
    return window[: max(1, texts * length // (window.shape[1] - 1))]


class TextPlan(Protocol):
    """The part of a recipe that all heads have, see `Recipe`."""

    @property
    def length(self) -> int: ...

    @property
    def sampled_texts(self) -> int: ...

    @property
    def steps(self) -> int: ...


@dataclass(frozen=True)
class OwnTexts:
    """Texts that the target wrote, [texts, length + 1]. `key` is a hash of what they depend on."""

    train: np.ndarray  # after prompts from the training files
    greedy: np.ndarray  # after prompts that were held out, at temperature 0
    sampled: np.ndarray  # the same at temperature 1
    key: str

    def save(self, directory: Path) -> None:
        """Write the texts into `directory`, where `own_texts` finds them."""
        arrays = {"train": self.train, "greedy": self.greedy, "sampled": self.sampled}
        save_arrays(directory / _OWN_TEXTS, self.key, arrays)


def train_head(
    target: TargetModel, corpus: Corpus, recipe: Recipe, directory: Path, start: str | Path | None = None
) -> NewHead:
    """Train a head in `directory`, or finish its training. `target` is frozen.

    start: a checkpoint directory or Hub id to train on from, which has the head's shape; None: a new head.

    Raises:
        ValueError: too little text, another training in `directory`, or `start` is not what the recipe says.
        CheckpointError: `start` is no head for this target.
    """
    if any(target.config.windows):
        raise ValueError("heads cannot be trained for sliding-window targets yet")
    started = None if start is None else _started(target, recipe, start)
    key = None if started is None else weights_fingerprint(started.head)
    inputs, samples = begin(target, corpus, recipe, directory, key)
    torch.manual_seed(0)
    new = started or _fresh(target, corpus, recipe)
    draft_ids, device = new.draft_ids(), target.embed.device
    lesson_of = torch.compile(teach) if recipe.compiled else teach
    loss_of = torch.compile(ttt_loss) if recipe.compiled else ttt_loss

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        window = text_window(corpus, samples, recipe, target.config.max_position, step).to(device)
        window = at_most(recipe.texts, window, recipe.length)
        temperature = recipe.temperatures[step // 2 % len(recipe.temperatures)]  # for each kind of text
        with torch.autocast(device.type, torch.bfloat16):
            lesson = lesson_of(target, window, draft_ids, new.head.aux_boundaries, temperature)
            return loss_of(new.head, lesson, recipe.passes, recipe.loss)[0], {}

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        return evaluate_head(target, new, corpus, samples, recipe.passes)

    with warnings.catch_warnings():  # the residual stream of an EAGLE-1 head is bfloat16 under autocast
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        train(Job(recipe.kind, new.head, directory, Schedule.of(recipe.steps, recipe.peak), loss, evaluate, inputs))
    return new


def begin(
    target: TargetModel, corpus: Corpus, recipe: TextPlan, directory: Path, start: str | None = None
) -> tuple[Mapping[str, Any], OwnTexts]:
    """The inputs of a training that starts or goes on in `directory`, and the texts that the target wrote for it.

    start: a hash of the head to start from; None: a new head.

    Raises:
        ValueError: too little text, or a training from other inputs is in `directory`.
    """
    if len(corpus.held_out) < recipe.length + 2:
        raise ValueError(f"too little text: {len(corpus.held_out)} tokens are held out, a text has {recipe.length + 1}")
    inputs = training_inputs(target, corpus.key, recipe, start)
    claim(directory, inputs, recipe.steps)
    return inputs, own_texts(target, corpus, recipe, directory, inputs["target"])


def own_texts(target: TargetModel, corpus: Corpus, recipe: TextPlan, directory: Path, target_key: str) -> OwnTexts:
    """Texts that the target with the fingerprint `target_key` wrote, from `directory`'s cache or sampled now."""
    length = recipe.length + 1
    prompts = TextSampling(length, (min(24, length // 4), length // 2))
    fixed = min(PROMPT, length // 2)

    def sample() -> dict[str, np.ndarray]:
        return {
            "train": target_texts(target, corpus.train, recipe.sampled_texts, prompts, seed=1),
            "greedy": target_texts(target, corpus.held_out, 32, TextSampling(length, (fixed, fixed), (0.0,)), seed=2),
            "sampled": target_texts(target, corpus.held_out, 32, TextSampling(length, (fixed, fixed), (1.0,)), seed=3),
        }

    depends_on = (target_key, corpus.key, str(length), str(recipe.sampled_texts))
    key = fingerprint(part.encode() for part in depends_on)
    arrays = cached_arrays(directory / _OWN_TEXTS, key, sample)
    return OwnTexts(arrays["train"], arrays["greedy"], arrays["sampled"], key)


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


def written_part(hits: Tensor, length: int) -> Tensor:
    """The columns of hits [.., rows] after the prompts of evaluation texts of length `length`."""
    return hits[..., min(PROMPT, length // 2) :]


def _fresh(target: TargetModel, corpus: Corpus, recipe: Recipe) -> NewHead:
    width = recipe.intermediate_size or target.config.intermediate_size
    if recipe.kind == "eagle":
        return new_eagle(target, width)
    vocab = target.config.vocab_size
    draft_ids = frequent_ids(corpus.train, vocab, min(vocab, recipe.draft_vocab or vocab))
    boundaries = recipe.boundaries or default_boundaries(target.config.num_layers)
    return new_eagle3(target, boundaries, draft_ids, width)


def _started(target: TargetModel, recipe: Recipe, start: str | Path) -> NewHead:
    if recipe.draft_vocab or recipe.intermediate_size or recipe.boundaries:
        raise ValueError(f"{start}: a head to start from has its vocabulary, width and aux layers; they cannot be set")
    return existing_head(target, start, recipe.kind)


def text_window(corpus: Corpus, samples: OwnTexts, recipe: TextPlan, longest: int, step: int) -> Tensor:
    """Texts [batch, length + 1] of one step, about 6144 tokens together.

    Steps alternate between the corpus and own texts. Every eighth step has a longer context.
    """
    turn, odd = divmod(step, 2)
    if odd and len(samples.train):
        count = max(1, TOKENS_PER_STEP // recipe.length)
        chosen = np.random.default_rng((1, step)).integers(0, len(samples.train), count)
        return torch.from_numpy(samples.train[chosen].astype(np.int64))
    lengths = (recipe.length,) * 3 + (min(4 * recipe.length, longest),)
    return windows(corpus.train, turn if len(samples.train) else step, lengths)
