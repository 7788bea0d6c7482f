"""The stages that `eagle-server train` runs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from eagle_server.models.checkpoints.load_target import load_family_target, read_model_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import resolve_checkpoint
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.text.tokenizer import load_tokenizer
from eagle_tools.training.block import train_block
from eagle_tools.training.capture import target_directory
from eagle_tools.training.captured_target import CapturedTarget
from eagle_tools.training.corpus import Corpus, ensure_tokenizer, own_files, standard_library, text_files, tokenize
from eagle_tools.training.data_parallel import first_before_others, is_first, is_started, joined, own_device, size
from eagle_tools.training.eagle3 import evaluate_head, train_head
from eagle_tools.training.export import (
    convert_head,
    export_demo,
    export_demo_heads,
    export_head,
    export_target,
    export_trained,
    write_evaluation,
)
from eagle_tools.training.fingerprint import target_fingerprint
from eagle_tools.training.head_card import write_head_card
from eagle_tools.training.heads import mean_head
from eagle_tools.training.loop import read_history
from eagle_tools.training.medusa import export_medusa, train_medusa
from eagle_tools.training.recipes import (
    DEMO_BLOCK,
    DEMO_HEAD,
    DEMO_MEDUSA,
    DEMO_PARTS,
    DEMO_REDRAFTER,
    DEMO_TUNINGS,
    ROW_LENGTH,
    AnyRecipe,
    BlockRecipe,
    MedusaRecipe,
    Recipe,
    RedrafterRecipe,
)
from eagle_tools.training.redrafter import train_redrafter
from eagle_tools.training.rows.commands import ROW_STAGES
from eagle_tools.training.rows.feature_files import CapturedFeatures
from eagle_tools.training.rows.row_set import RowSet, captured_row_set, read_row_set, token_rows
from eagle_tools.training.rows.token_rows import is_row_file
from eagle_tools.training.sources import own_texts
from eagle_tools.training.target import DEMO_TARGET, VOCAB_SIZE, train_target
from eagle_tools.training.token_counts import TokenCounts


def _tokenizer(parsed: argparse.Namespace) -> None:
    ensure_tokenizer(parsed.work / "tokenizer.json", VOCAB_SIZE)


def _target(parsed: argparse.Namespace) -> None:
    train_target(_demo_corpus(parsed.work), parsed.work, parsed.target_steps, compiled=parsed.compile)
    export_target(parsed.work, parsed.work / "target")


def _head(parsed: argparse.Namespace) -> None:
    recipe = Recipe(
        kind=parsed.kind,
        passes=parsed.passes,
        boundaries=_boundaries(parsed),
        draft_vocab=parsed.draft_vocab,
        intermediate_size=parsed.ffn,
        temperatures=tuple(parsed.temperatures),
        **_common(parsed),
    )
    _train_and_write(*_target_and_data(parsed), recipe, parsed.out, parsed.init)


def _mtp(parsed: argparse.Namespace) -> None:
    recipe = Recipe(kind="mtp", passes=parsed.passes, temperatures=tuple(parsed.temperatures), **_common(parsed))
    own = None if parsed.init else parsed.target  # there is no training from random weights
    _train_and_write(*_target_and_data(parsed), recipe, parsed.out, parsed.init or own, own)


def _medusa(parsed: argparse.Namespace) -> None:
    recipe = MedusaRecipe(
        heads=parsed.heads,
        layers=parsed.layers,
        shared_lm_head=parsed.shared_lm_head,
        **_common(parsed),
    )
    _train_and_write(*_target_and_data(parsed), recipe, parsed.out, parsed.init)


def _redrafter(parsed: argparse.Namespace) -> None:
    recipe = RedrafterRecipe(
        rollout=parsed.rollout,
        exit_dim=parsed.exit_dim,
        draft_layers=parsed.draft_layers,
        **_common(parsed),
    )
    _train_and_write(*_target_and_data(parsed), recipe, parsed.out, parsed.init)


def _block(parsed: argparse.Namespace) -> None:
    recipe = BlockRecipe(
        layers=parsed.layers,
        block_size=parsed.block_size,
        next_token=not parsed.fill_in,
        causal=not parsed.bidirectional,
        edges=parsed.edges,
        rank=parsed.rank,
        confidence=not parsed.no_confidence,
        boundaries=_boundaries(parsed),
        intermediate_size=parsed.ffn,
        mask_token_id=parsed.mask_token_id,
        weighting=parsed.weights,
        gamma=parsed.gamma,
        anchors=parsed.anchors,
        **_common(parsed),
    )
    _train_and_write(*_target_and_data(parsed), recipe, parsed.out, parsed.init)


def _common(parsed: argparse.Namespace) -> dict[str, Any]:
    """The settings of every recipe, from the options that every head's training has."""
    names = ("steps", "peak", "texts", "sampled_texts", "loss", "accumulate")
    if parsed.accumulate < 1:
        raise ValueError("--accumulate should be at least 1")
    if parsed.accumulate % size():
        least = -(-parsed.accumulate // size()) * size()
        raise ValueError(f"--accumulate {parsed.accumulate}: a multiple of the {size()} processes is expected: {least}")
    settings = {"compiled": parsed.compile, **{name: getattr(parsed, name) for name in names}}
    if _has_rows(parsed):
        return {**settings, "sampled_texts": 0, "length": parsed.length or ROW_LENGTH}
    return {**settings, "length": parsed.length or Recipe.length}


def _boundaries(parsed: argparse.Namespace) -> tuple[int, ...] | None:
    """The boundaries of --aux-layers. Without it a new head reads those that were captured. None: the defaults.

    Raises:
        ValueError: one of them was not captured.
    """
    asked = tuple(parsed.aux_layers) if parsed.aux_layers else None
    if parsed.features is None or parsed.init is not None:
        return asked
    captured = CapturedFeatures(parsed.features).facts.boundaries
    if missing := sorted(set(asked or ()) - set(captured)):
        found = " ".join(map(str, captured))
        raise ValueError(f"--aux-layers {missing[0]}: {parsed.features} has {found}; capture again with --aux-layers")
    return asked or captured


def _has_rows(parsed: argparse.Namespace) -> bool:
    """Whether --data names files of token rows, or there are --features of rows.

    Raises:
        ValueError: only some files are, or both are given.
    """
    if parsed.features is not None:
        if parsed.data:
            raise ValueError("--data and --features: the features have their rows; drop --data")
        return True
    rows = [is_row_file(file) for file in parsed.data or ()]
    if any(rows) and not all(rows):
        raise ValueError("--data: some are files of token rows, and some are not; give one kind")
    return any(rows)


def _target_and_data(parsed: argparse.Namespace) -> tuple[TargetModel, Corpus | RowSet]:
    has_rows = _has_rows(parsed)
    if parsed.features is not None:
        return _captured(parsed)
    texts = text_files(parsed.data, parsed.out) if parsed.data and not has_rows else None
    directory = resolve_checkpoint(parsed.target)
    target = load_family_target(directory, Loading(pack=False), dtype="float32", device=_device(parsed.device))
    if has_rows:
        length = parsed.length or ROW_LENGTH
        if length + 1 > target.config.max_position:
            raise ValueError(f"--length {length}: the target has a context of {target.config.max_position} tokens")
        special = {*load_tokenizer(str(directory)).special, *target.config.eos_token_ids}
        return target, read_row_set(parsed.data, target.config.vocab_size, special, length)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = target.config.eos_token_ids[0] if target.config.eos_token_ids else 0
    cache = parsed.out / "training" / "corpus.npz"
    with first_before_others():
        if texts is not None:
            return target, own_files(tokenizer, texts, end, cache)
        return target, standard_library(tokenizer, end, cache)


def _captured(parsed: argparse.Namespace) -> tuple[CapturedTarget, RowSet]:
    """The target without its layers, and the rows with their features.

    Raises:
        ValueError: the features are those of another target, or the capture is not complete.
    """
    features, length = CapturedFeatures(parsed.features), parsed.length or ROW_LENGTH
    directory = target_directory(parsed.target)
    facts = features.facts
    config = dataclasses.replace(read_model_config(directory), eos_token_ids=facts.eos_token_ids)
    found = (facts.architecture, facts.hidden_size, facts.vocab_size)
    if found != (config.architecture, config.hidden_size, config.vocab_size):
        raise ValueError(f"{parsed.features}: captured from another target, {found[0]}; --target is it")
    target = CapturedTarget(config, features.weights(), facts.boundaries, _device(parsed.device))
    special = {*load_tokenizer(str(directory)).special, *config.eos_token_ids}
    return target, captured_row_set(features, special, length)


def _device(name: str) -> str:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return own_device(name)


def _export(parsed: argparse.Namespace) -> None:
    size = export_demo(parsed.work, parsed.out, DEMO_PARTS)
    print(f"{parsed.out}: {size / 1e6:.1f} MB")


def _demo(parsed: argparse.Namespace) -> None:
    _target(parsed)
    target, corpus = load_family_target(parsed.work / "target", Loading(pack=False)), _demo_corpus(parsed.work)
    recipe = dataclasses.replace(DEMO_HEAD, steps=parsed.head_steps, compiled=parsed.compile)
    first, *tuned = (parsed.work / part for part in DEMO_PARTS)
    _train_and_write(target, corpus, recipe, first)
    texts = own_texts(target, corpus, recipe, first / "training", target_fingerprint(target))
    for tuning, out in zip(DEMO_TUNINGS, tuned, strict=True):
        texts.save(out / "training")
        _train_and_write(target, corpus, dataclasses.replace(tuning, compiled=parsed.compile), out, first)
    new = mean_head(target, [first, *tuned], recipe.kind)
    export_head(new, parsed.work / "eagle3")
    write_evaluation(parsed.work / "eagle3", evaluate_head(target, new, corpus, texts, recipe.passes))
    _export(parsed)
    _demo_heads(parsed)


def _token_map(parsed: argparse.Namespace) -> None:
    directory = resolve_checkpoint(parsed.model_path)
    config = read_model_config(directory)
    streams, files = list[np.ndarray](), text_files(parsed.text or ())
    if files:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        streams.append(tokenize(tokenizer, files, (config.eos_token_ids or (0,))[0], "text"))
    rows = token_rows(parsed.data or (), config.vocab_size)
    supervised = (np.asarray(row.input_ids)[np.asarray(row.loss_mask, dtype=bool)] for row in rows)
    special = {*load_tokenizer(str(directory)).special, *config.eos_token_ids}
    counts = TokenCounts.of(chain(streams, supervised), config.vocab_size, special)
    if not counts.total:
        raise ValueError("--data, --text: no token to count; give rows whose loss_mask has 1s, or files with text")
    draft_ids = counts.draft_ids(parsed.size)
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(draft_ids, parsed.out)
    print(f"{counts.table(parsed.size)}\n{parsed.out}: {parsed.size} of {config.vocab_size} tokens")


def _convert(parsed: argparse.Namespace) -> None:
    convert_head(parsed.head, parsed.target, parsed.out, parsed.format)
    print(f"{parsed.out}: written for {parsed.format}, and loaded again")


def _demo_corpus(work: Path) -> Corpus:
    tokenizer = ensure_tokenizer(work / "tokenizer.json", VOCAB_SIZE)
    return standard_library(tokenizer, int(str(DEMO_TARGET["eos_token_id"])), work / "corpus.npz")


def _demo_heads(parsed: argparse.Namespace) -> None:
    """Train the demo's other heads for its target; Medusa and ReDrafter on the same texts."""
    directory = parsed.out / "target"
    target = load_family_target(directory, Loading(pack=False), dtype="float32", device="cpu")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    corpus = standard_library(tokenizer, target.config.eos_token_ids[0], parsed.work / "corpus.npz")
    texts = own_texts(target, corpus, DEMO_MEDUSA, parsed.work, target_fingerprint(target))
    for recipe in (DEMO_MEDUSA, DEMO_REDRAFTER, DEMO_BLOCK):
        recipe = dataclasses.replace(recipe, steps=parsed.other_head_steps or recipe.steps, compiled=parsed.compile)
        if recipe.sampled_texts == DEMO_MEDUSA.sampled_texts:
            texts.save(parsed.work / recipe.kind / "training")
        _train_and_write(target, corpus, recipe, parsed.work / recipe.kind)
    size = export_demo_heads(parsed.work, parsed.out)
    print(f"{parsed.out}: {size / 1e6:.1f} MB")


def _train_and_write(
    target: TargetModel,
    data: Corpus | RowSet,
    recipe: AnyRecipe,
    out: Path,
    start: str | Path | None = None,
    target_path: str | None = None,
) -> None:
    training = out / "training"
    write: Callable[[], None]
    match recipe:
        case MedusaRecipe():
            write = partial(export_medusa, train_medusa(target, data, recipe, training, start), out)
        case RedrafterRecipe():
            write = partial(export_head, train_redrafter(target, data, recipe, training, start), out)
        case BlockRecipe():
            write = partial(export_head, train_block(target, data, recipe, training, start), out)
        case Recipe():
            write = partial(export_trained, train_head(target, data, recipe, training, start, target_path), target, out)
    if not is_first():
        return
    write()
    history = read_history(training / f"{recipe.kind}-history.json")
    print(write_head_card(out, history, recipe.kind))
    for name, points in history.curves.items():
        if name.startswith(("T=", "answers")):
            print(f"{name}: {points[0][1]:.3f} at step {points[0][0]}, {points[-1][1]:.3f} at step {points[-1][0]}")
    print(f"{out}: done; curves in {training / f'{recipe.kind}-loss.png'}")


def run_stage(parsed: argparse.Namespace) -> None:
    """Run the stage of a parsed command line. Processes that torchrun started train a head together.

    Raises:
        ValueError: torchrun started several processes for a stage that is no training of a head.
    """
    if parsed.stage in _HEADS:
        with joined(_device(parsed.device)):
            _HEADS[parsed.stage](parsed)
    elif is_started():
        raise ValueError(f"{parsed.stage}: one process computes it; start it without torchrun")
    else:
        _OTHERS[parsed.stage](parsed)


_HEADS: dict[str, Callable[[argparse.Namespace], None]] = {
    "eagle3": _head,
    "mtp": _mtp,
    "medusa": _medusa,
    "redrafter": _redrafter,
    "block": _block,
}
_OTHERS: dict[str, Callable[[argparse.Namespace], None]] = {
    "demo": _demo,
    "tokenizer": _tokenizer,
    "target": _target,
    "export": _export,
    "demo-heads": _demo_heads,
    **ROW_STAGES,
    "token-map": _token_map,
    "convert": _convert,
}
