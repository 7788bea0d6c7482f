"""Command line of the training: the demo pair, by stages or all at once, and heads for other targets."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from eagle_server.models.checkpoints.load_target import load_native_target
from eagle_server.models.checkpoints.weights import resolve_checkpoint
from eagle_server.models.config import CheckpointError
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools import DEMO
from eagle_tools.training.block import BlockRecipe, train_block
from eagle_tools.training.corpus import Corpus, ensure_tokenizer, own_files, standard_library
from eagle_tools.training.eagle3 import Recipe, evaluate_head, own_texts, train_head
from eagle_tools.training.export import export_demo, export_demo_heads, export_head, export_target, write_evaluation
from eagle_tools.training.fingerprint import target_fingerprint
from eagle_tools.training.heads import mean_head
from eagle_tools.training.loop import read_history
from eagle_tools.training.losses import LOSS_NAMES
from eagle_tools.training.medusa import MedusaRecipe, export_medusa, train_medusa
from eagle_tools.training.packed_blocks import WEIGHTINGS
from eagle_tools.training.redrafter import RedrafterRecipe, train_redrafter
from eagle_tools.training.target import DEMO_TARGET, VOCAB_SIZE, train_target

AnyRecipe = Recipe | MedusaRecipe | RedrafterRecipe | BlockRecipe
DEMO_HEAD = Recipe(draft_vocab=2048, intermediate_size=512, steps=900, sampled_texts=2048)
DEMO_TUNINGS = (  # further trainings of that head; the demo's is the mean of all three
    Recipe(loss="tv", steps=500, peak=1e-3, texts=8, sampled_texts=2048),
    Recipe(loss="coupled", steps=400, peak=1e-3, texts=8, sampled_texts=2048),
)
DEMO_PARTS = tuple(f"eagle3-{recipe.loss}" for recipe in (DEMO_HEAD, *DEMO_TUNINGS))
DEMO_MEDUSA = MedusaRecipe(layers=2, shared_lm_head=True, steps=600, texts=8, sampled_texts=512)
DEMO_REDRAFTER = RedrafterRecipe(exit_dim=256, steps=600, texts=8, sampled_texts=512)
DEMO_BLOCK = BlockRecipe(intermediate_size=512, loss="kl+tv", peak=1e-2, steps=1400, texts=8, sampled_texts=3072)

_ABOUT = """\
Train draft heads, and the demo pair that this package contains.

  a head for your own target:
    python -m eagle_tools.training eagle3 --target PATH_OR_HUB_ID --data FILE_OR_DIRECTORY... --out HEAD
    python -m eagle_server --model-path PATH_OR_HUB_ID --speculative-draft-model-path HEAD
  a head from elsewhere, trained further for the temperatures that you serve:
    python -m eagle_tools.training eagle3 --init HEAD --loss kl+tv --peak 5e-4 --target ... --data ... --out BETTER
  Medusa heads for it: the same with `medusa` for eagle3 and, when serving, --speculative-algorithm MEDUSA
  a block drafter for it: the same with `block`, and --speculative-algorithm DFLASH
  the demo, all stages in order (tokenizer, target, eagle3, export, demo-heads):
    python -m eagle_tools.training demo --work DIR
  find the static tree for a draft, your text and your machine:
    python -m eagle_tools.training.tree_search --help

Every stage can resume: run the same command again. Only the number of steps may grow; a checkpoint of another target,
other text or other settings is refused. Progress bars go to stderr, loss curves to PNG files in the working
directory."""


def main(arguments: list[str] | None = None) -> int:
    """Run one stage; returns 0, or 2 after one line on stderr that says what is wrong."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m eagle_tools.training", description=_ABOUT, formatter_class=raw)
    stages = parser.add_subparsers(title="stages", required=True, metavar="STAGE")

    def stage(name: str, run: object, text: str) -> argparse.ArgumentParser:
        added = stages.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    demo = stage("demo", _demo, "make the demo: every stage below, in order")
    tokenizer = stage("tokenizer", _tokenizer, "train the demo's tokenizer on the standard library's source")
    target = stage("target", _target, "train the demo's target, and write it to WORK/target")
    export = stage("export", _export, "assemble the demo's directory, with its model card, from WORK")
    for one in (demo, tokenizer, target, export):
        one.add_argument("--work", type=Path, required=True, help="directory of checkpoints, curves and caches")
    for one in (demo, target):
        one.add_argument("--target-steps", type=int, default=1900, help="training steps of 6144 tokens (%(default)s)")
        one.add_argument(
            "--compile", action="store_true", help="use torch.compile (some minutes at first, then faster)"
        )
    demo.add_argument(
        "--head-steps", type=int, default=DEMO_HEAD.steps, help="first steps of the EAGLE-3 head (%(default)s)"
    )
    for one in (demo, export):
        one.add_argument("--out", type=Path, default=DEMO, help="where the pair is written (%(default)s)")
    heads = stage(
        "demo-heads", _demo_heads, "train Medusa, ReDrafter and block heads for the demo's target in OUT, into OUT"
    )
    heads.add_argument("--work", type=Path, required=True, help="directory of checkpoints, curves and caches")
    heads.add_argument("--out", type=Path, default=DEMO, help="the demo's directory (%(default)s)")
    heads.add_argument("--compile", action="store_true", help="use torch.compile")
    for one in (demo, heads):
        one.add_argument("--other-head-steps", type=int, help="steps of each Medusa, ReDrafter and block training")
    _add_head_arguments(stage("eagle3", _head, "train an EAGLE-3 head (or EAGLE-1) for a dense target"))
    _add_medusa_arguments(stage("medusa", _medusa, "train Medusa heads for a dense target"))
    _add_redrafter_arguments(stage("redrafter", _redrafter, "train a ReDrafter head for a dense target"))
    _add_block_arguments(stage("block", _block, "train a block drafter (DFlash, DFlash 2, DSpark) for a dense target"))
    return parser


def _add_common_arguments(parser: argparse.ArgumentParser, default: AnyRecipe) -> None:
    """The options that every head's training has."""
    parser.add_argument("--target", required=True, help="checkpoint directory or Hub id of a dense target")
    parser.add_argument("--out", type=Path, required=True, help="where the head is written; training/ below it resumes")
    parser.add_argument(
        "--data", type=Path, nargs="+", help="text files or directories of them (not given: Python's standard library)"
    )
    parser.add_argument(
        "--steps", type=int, default=default.steps, help="training steps of about 6144 rows (%(default)s)"
    )
    parser.add_argument("--peak", type=float, default=default.peak, help="highest learning rate (%(default)s)")
    parser.add_argument(
        "--length", type=int, default=default.length, help="tokens per text; one in eight is longer (%(default)s)"
    )
    parser.add_argument("--texts", type=int, default=default.texts, help="maximum per step (%(default)s)")
    parser.add_argument(
        "--loss",
        choices=LOSS_NAMES,
        default=default.loss,
        help="kl: soft-label cross-entropy; above temperature 0, tv: for chains, coupled: for trees (%(default)s)",
    )
    parser.add_argument(
        "--sampled-texts",
        type=int,
        default=default.sampled_texts,
        help="texts the target writes to train on (%(default)s)",
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to train on (%(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="use torch.compile (some minutes at first, then faster)")


def _add_head_arguments(parser: argparse.ArgumentParser) -> None:
    default = Recipe()
    _add_common_arguments(parser, default)
    parser.add_argument(
        "--kind", choices=("eagle3", "eagle"), default=default.kind, help="the head's format (%(default)s)"
    )
    parser.add_argument("--passes", type=int, default=default.passes, help="draft steps that are trained (%(default)s)")
    parser.add_argument("--draft-vocab", type=int, help="only the most frequent tokens are drafted (EAGLE-3)")
    parser.add_argument("--ffn", type=int, help="width of the head's MLP (not given: the target's)")
    parser.add_argument(
        "--aux-layers", type=int, nargs="+", metavar="B", help="boundaries to read, B = after B layers (EAGLE-3)"
    )
    parser.add_argument("--init", metavar="HEAD", help="directory or Hub id of a head to train on; it has all sizes")
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=default.temperatures,
        metavar="T",
        help="temperatures of target and draft in the loss, one step each in turn (1)",
    )


def _add_medusa_arguments(parser: argparse.ArgumentParser) -> None:
    default = MedusaRecipe()
    _add_common_arguments(parser, default)
    parser.add_argument("--heads", type=int, default=default.heads, help="positions guessed ahead (%(default)s)")
    parser.add_argument("--layers", type=int, default=default.layers, help="residual blocks per head (%(default)s)")
    parser.add_argument(
        "--shared-lm-head",
        action="store_true",
        help="heads without their own lm_heads: smaller, and a little less accurate",
    )


def _add_redrafter_arguments(parser: argparse.ArgumentParser) -> None:
    default = RedrafterRecipe()
    _add_common_arguments(parser, default)
    parser.add_argument(
        "--rollout", type=int, default=default.rollout, help="draft steps that are trained (%(default)s)"
    )
    parser.add_argument("--exit-dim", type=int, help="width of the residual blocks (not given: twice the target's)")
    parser.add_argument("--draft-layers", type=int, default=default.draft_layers, help="how many blocks (%(default)s)")


def _add_block_arguments(parser: argparse.ArgumentParser) -> None:
    default = BlockRecipe()
    _add_common_arguments(parser, default)
    parser.add_argument("--layers", type=int, default=default.layers, help="of the drafter (%(default)s)")
    parser.add_argument("--block-size", type=int, default=default.block_size, help="rows of a block (%(default)s)")
    parser.add_argument(
        "--fill-in", action="store_true", help="a row drafts the token at its own place (not given: the one after it)"
    )
    parser.add_argument(
        "--bidirectional", action="store_true", help="rows see later rows of their block (not given: causal)"
    )
    parser.add_argument(
        "--edges",
        choices=("none", "selector", "markov"),
        default=default.edges,
        help="what the token before adds to scores: DFlash 2's selector, DSpark's Markov head (%(default)s)",
    )
    parser.add_argument("--rank", type=int, default=default.rank, help="rank of the edges (%(default)s)")
    parser.add_argument("--no-confidence", action="store_true", help="without DSpark's confidence head")
    parser.add_argument("--mask-token-id", type=int, help="of the rows behind the root (not given: the rarest token)")
    parser.add_argument("--ffn", type=int, help="width of the MLPs (not given: the target's)")
    parser.add_argument("--aux-layers", type=int, nargs="+", metavar="B", help="boundaries to read, B = after B layers")
    parser.add_argument(
        "--weights",
        choices=WEIGHTINGS,
        default=default.weighting,
        help="of a block's drafts in the loss: decay by place, or by the chance that a chain gets there (%(default)s)",
    )
    parser.add_argument("--gamma", type=float, default=default.gamma, help="places until decay is 1/e (%(default)s)")
    parser.add_argument(
        "--anchors", type=int, default=default.anchors, help="blocks per --length tokens of a text (%(default)s)"
    )


def _tokenizer(parsed: argparse.Namespace) -> None:
    ensure_tokenizer(parsed.work / "tokenizer.json", VOCAB_SIZE)


def _target(parsed: argparse.Namespace) -> None:
    train_target(_demo_corpus(parsed.work), parsed.work, parsed.target_steps, compiled=parsed.compile)
    export_target(parsed.work, parsed.work / "target")


def _head(parsed: argparse.Namespace) -> None:
    recipe = Recipe(
        kind=parsed.kind,
        passes=parsed.passes,
        boundaries=tuple(parsed.aux_layers) if parsed.aux_layers else None,
        draft_vocab=parsed.draft_vocab,
        intermediate_size=parsed.ffn,
        temperatures=tuple(parsed.temperatures),
        **_common(parsed),
    )
    _train_and_write(*_target_and_corpus(parsed), recipe, parsed.out, parsed.init)


def _medusa(parsed: argparse.Namespace) -> None:
    recipe = MedusaRecipe(
        heads=parsed.heads,
        layers=parsed.layers,
        shared_lm_head=parsed.shared_lm_head,
        **_common(parsed),
    )
    _train_and_write(*_target_and_corpus(parsed), recipe, parsed.out)


def _redrafter(parsed: argparse.Namespace) -> None:
    recipe = RedrafterRecipe(
        rollout=parsed.rollout,
        exit_dim=parsed.exit_dim,
        draft_layers=parsed.draft_layers,
        **_common(parsed),
    )
    _train_and_write(*_target_and_corpus(parsed), recipe, parsed.out)


def _block(parsed: argparse.Namespace) -> None:
    recipe = BlockRecipe(
        layers=parsed.layers,
        block_size=parsed.block_size,
        next_token=not parsed.fill_in,
        causal=not parsed.bidirectional,
        edges=parsed.edges,
        rank=parsed.rank,
        confidence=not parsed.no_confidence,
        boundaries=tuple(parsed.aux_layers) if parsed.aux_layers else None,
        intermediate_size=parsed.ffn,
        mask_token_id=parsed.mask_token_id,
        weighting=parsed.weights,
        gamma=parsed.gamma,
        anchors=parsed.anchors,
        **_common(parsed),
    )
    _train_and_write(*_target_and_corpus(parsed), recipe, parsed.out)


def _common(parsed: argparse.Namespace) -> dict[str, Any]:
    """The settings of every recipe, from the options that every head's training has."""
    names = ("steps", "peak", "length", "texts", "sampled_texts", "loss")
    return {"compiled": parsed.compile, **{name: getattr(parsed, name) for name in names}}


def _target_and_corpus(parsed: argparse.Namespace) -> tuple[TargetModel, Corpus]:
    directory = resolve_checkpoint(parsed.target)
    target = load_native_target(directory, dtype="float32", device=parsed.device, pack=False)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = target.config.eos_token_ids[0] if target.config.eos_token_ids else 0
    cache = parsed.out / "training" / "corpus.npz"
    if parsed.data:
        return target, own_files(tokenizer, parsed.data, end, cache, out=parsed.out)
    return target, standard_library(tokenizer, end, cache)


def _export(parsed: argparse.Namespace) -> None:
    size = export_demo(parsed.work, parsed.out, DEMO_PARTS)
    print(f"{parsed.out}: {size / 1e6:.1f} MB")


def _demo(parsed: argparse.Namespace) -> None:
    _target(parsed)
    target, corpus = load_native_target(parsed.work / "target", pack=False), _demo_corpus(parsed.work)
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


def _demo_corpus(work: Path) -> Corpus:
    tokenizer = ensure_tokenizer(work / "tokenizer.json", VOCAB_SIZE)
    return standard_library(tokenizer, int(str(DEMO_TARGET["eos_token_id"])), work / "corpus.npz")


def _demo_heads(parsed: argparse.Namespace) -> None:
    """Train the demo's other heads for its target; Medusa and ReDrafter on the same texts."""
    directory = parsed.out / "target"
    target = load_native_target(directory, dtype="float32", device="cpu", pack=False)
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
    target: TargetModel, corpus: Corpus, recipe: AnyRecipe, out: Path, start: str | Path | None = None
) -> None:
    training = out / "training"
    match recipe:
        case MedusaRecipe():
            export_medusa(train_medusa(target, corpus, recipe, training), out)
        case RedrafterRecipe():
            export_head(train_redrafter(target, corpus, recipe, training), out)
        case BlockRecipe():
            export_head(train_block(target, corpus, recipe, training), out)
        case Recipe():
            export_head(train_head(target, corpus, recipe, training, start), out)
    for name, points in read_history(training / f"{recipe.kind}-history.json").curves.items():
        if name.startswith("T="):
            print(f"{name}: {points[0][1]:.3f} at step {points[0][0]}, {points[-1][1]:.3f} at step {points[-1][0]}")
    print(f"{out}: done; curves in {training / f'{recipe.kind}-loss.png'}")


if __name__ == "__main__":
    sys.exit(main())
