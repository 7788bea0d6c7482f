"""Where the windows of a training come from: a corpus and texts that the target wrote, or token rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.data_parallel import first_before_others
from eagle_tools.training.fingerprint import cached_arrays, claim, fingerprint, save_arrays, training_inputs
from eagle_tools.training.generate import TextSampling, target_texts
from eagle_tools.training.packing import Packing
from eagle_tools.training.rows.row_set import RowSet
from eagle_tools.training.target import TOKENS_PER_STEP, windows

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
    def texts(self) -> int: ...

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


@dataclass(frozen=True)
class CorpusTexts:
    """The windows of a training on text."""

    accept_length: ClassVar[str] = "T=0 accept length"  # the evaluated number that chooses the weights

    corpus: Corpus
    samples: OwnTexts
    recipe: TextPlan
    longest: int  # context of the target

    def window(self, step: int) -> tuple[Tensor, None]:
        """The texts [batch, length + 1] of one step, see `text_window`."""
        window = text_window(self.corpus, self.samples, self.recipe, self.longest, step)
        return at_most(self.recipe.texts, window, self.recipe.length), None


@dataclass(frozen=True)
class RowTexts:
    """The windows of a training on token rows."""

    accept_length: ClassVar[str] = "answers accept length"

    rows: RowSet
    recipe: TextPlan

    def window(self, step: int) -> tuple[Tensor, Packing]:
        """The windows [batch, length + 1] of one step, and the documents in them."""
        count = max(1, min(self.recipe.texts, TOKENS_PER_STEP // self.rows.length))
        return self.rows.window(step, count)


def begin(
    target: TargetModel, data: Corpus | RowSet, recipe: TextPlan, directory: Path, start: str | None = None
) -> tuple[Mapping[str, Any], CorpusTexts | RowTexts]:
    """The inputs of a training that starts or goes on in `directory`, and its windows.

    start: a hash of the head to start from; None: a new head.

    Raises:
        ValueError: too little text, or a training from other inputs is in `directory`.
    """
    if isinstance(data, RowSet):
        if target.config.recurrent is not None and data.features is None:
            raise ValueError(
                "the trainer cannot compute recurrent layers; `eagle-server train capture` writes what your engine "
                "computes, and --features takes it in the place of --data"
            )
    elif any(target.config.windows):
        raise ValueError("heads for sliding-window targets are trained on token rows; text files cannot be taken yet")
    elif len(data.held_out) < recipe.length + 2:
        raise ValueError(f"too little text: {len(data.held_out)} tokens are held out, a text has {recipe.length + 1}")
    inputs = training_inputs(target, data.key, recipe, start)
    with first_before_others():
        claim(directory, inputs, recipe.steps)
        if isinstance(data, RowSet):
            return inputs, RowTexts(data, recipe)
        samples = own_texts(target, data, recipe, directory, inputs["target"])
    return inputs, CorpusTexts(data, samples, recipe, target.config.max_position)


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


def written_part(hits: Tensor, length: int) -> Tensor:
    """The columns of hits [.., rows] after the prompts of evaluation texts of length `length`."""
    return hits[..., min(PROMPT, length // 2) :]
