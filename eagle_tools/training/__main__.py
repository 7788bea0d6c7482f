"""`eagle-server train`: training of the demo pair, by stages or all at once, and of heads for other targets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_server.config.commands import CommandParser, flags_of
from eagle_tools import DEMO, require_extra
from eagle_tools.training.recipes import (
    DEMO_HEAD,
    DIALECTS,
    LOSS_NAMES,
    MTP,
    ROW_LENGTH,
    WEIGHTINGS,
    AnyRecipe,
    BlockRecipe,
    MedusaRecipe,
    Recipe,
    RedrafterRecipe,
)

CAPTURE = "capture"
_CAPTURES = "write what the engine that serves computes for token rows, to train on"
_ABOUT = """\
Train draft heads, and the demo pair that this package contains.

  a head for your own target:
    eagle-server train eagle3 --target PATH_OR_HUB_ID --data FILE_OR_DIRECTORY... --out HEAD
    eagle-server --model-path PATH_OR_HUB_ID --speculative-draft-model-path HEAD
  how it drafts on conversations, by the server's counters, beside decoding without it:
    eagle-server train evaluate --target PATH_OR_HUB_ID --head HEAD --data CHATS.jsonl
  a head from elsewhere, trained further for the temperatures that you serve:
    eagle-server train eagle3 --init HEAD --loss kl+tv --peak 5e-4 --target ... --data ... --out BETTER
  the target's own MTP layers, for as many draft steps as you serve:
    eagle-server train mtp --target PATH_OR_HUB_ID --data ROWS.jsonl --out HEAD
  Medusa heads for it: the same with `medusa` for eagle3 and, when serving, --speculative-algorithm MEDUSA
  rows that your served model writes, which is the best data for its head:
    eagle-server train regenerate --data PROMPTS.jsonl --url http://HOST:PORT/v1 --out ROWS.jsonl
  a head for a target that is quantized, large, or has no class of its own here: its engine computes the rows once
    eagle-server train capture --target PATH_OR_HUB_ID --data ROWS.jsonl --out FEATURES --quantization int8
    eagle-server train eagle3 --target PATH_OR_HUB_ID --features FEATURES --out HEAD
  rows of a chat model's conversations to train on, masked to what the model generates:
    eagle-server train prepare --data CHATS.jsonl --model-path PATH_OR_HUB_ID --out ROWS.jsonl
    eagle-server train eagle3 --target PATH_OR_HUB_ID --data ROWS.jsonl --draft-vocab 32000 --out HEAD
  a map of frequent tokens for a head with a large vocabulary (MTP), to serve with --speculative-token-map MAP:
    eagle-server train token-map --model-path PATH_OR_HUB_ID --data ROWS.jsonl --size 32768 --out MAP.pt
  a block drafter for it: the same with `block`, and --speculative-algorithm DFLASH
  the demo, all stages in order (tokenizer, target, eagle3, export, demo-heads):
    eagle-server train demo --work DIR
  find the static tree for a draft, your text and your machine:
    python -m eagle_tools.training.tree_search --help

Every stage can resume: run the same command again. Only the number of steps may grow; a checkpoint of another target,
other text or other settings is refused. Progress bars go to stderr, loss curves to PNG files in the working
directory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage; returns 0, or 2 after one line on stderr that says what is wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _with_server_flags(words[1:]) if words[:1] == [CAPTURE] else _parser().parse_args(words)
    require_extra("train")
    from eagle_tools.training.stages import run_stage  # imports torch, which --help does not need

    try:
        run_stage(parsed)
    except (ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _with_server_flags(words: Sequence[str]) -> argparse.Namespace:
    """The options of CAPTURE. `flags` are the server's, unparsed.

    Raises:
        SystemExit: as `CommandParser.split`.
    """
    parser = CommandParser(f"eagle-server train {CAPTURE}", _CAPTURES)
    _add_capture_arguments(parser)
    refused = {"--model-path": "--target names the model"}
    refused |= dict.fromkeys(flags_of("server"), "nothing is served here")
    refused |= dict.fromkeys(flags_of("speculative"), "nothing is drafted here")
    parsed, flags = parser.split(words, refused)
    parsed.flags = flags
    parsed.stage = CAPTURE
    return parsed


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("eagle-server train", description=_ABOUT, formatter_class=raw)
    stages = parser.add_subparsers(title="stages", required=True, metavar="STAGE")

    def stage(name: str, text: str) -> argparse.ArgumentParser:
        added = stages.add_parser(name, help=text, description=text)
        added.set_defaults(stage=name)
        return added

    demo = stage("demo", "make the demo: every stage below, in order")
    tokenizer = stage("tokenizer", "train the demo's tokenizer on the standard library's source")
    target = stage("target", "train the demo's target, and write it to WORK/target")
    export = stage("export", "assemble the demo's directory, with its model card, from WORK")
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
    heads = stage("demo-heads", "train Medusa, ReDrafter and block heads for the demo's target in OUT, into OUT")
    heads.add_argument("--work", type=Path, required=True, help="directory of checkpoints, curves and caches")
    heads.add_argument("--out", type=Path, default=DEMO, help="the demo's directory (%(default)s)")
    heads.add_argument("--compile", action="store_true", help="use torch.compile")
    for one in (demo, heads):
        one.add_argument("--other-head-steps", type=int, help="steps of each Medusa, ReDrafter and block training")
    _add_regenerate_arguments(stage("regenerate", "let a served model answer conversations anew, as token rows"))
    _add_evaluate_arguments(stage("evaluate", "measure a served head on conversations: acceptance and tokens/s"))
    _add_capture_arguments(stage(CAPTURE, _CAPTURES))  # for the help; `_with_server_flags` reads them
    _add_prepare_arguments(stage("prepare", "make token rows, with a loss mask, of conversations"))
    _add_token_map_arguments(stage("token-map", "choose the frequent tokens that a draft with all tokens proposes"))
    convert = stage("convert", "write an EAGLE-3 head in the format of SGLang, or of speculators for vLLM")
    convert.add_argument("--head", required=True, help="directory or Hub id of the head")
    convert.add_argument("--target", required=True, help="directory or Hub id of its target")
    convert.add_argument("--out", type=Path, required=True, help="where it is written")
    convert.add_argument("--format", choices=DIALECTS, required=True, help="sglang, or speculators, which vLLM reads")
    _add_head_arguments(stage("eagle3", "train an EAGLE-3 head (or EAGLE-1) for a dense target"))
    _add_mtp_arguments(stage("mtp", "train the target's own MTP layers further, for several draft steps"))
    _add_medusa_arguments(stage("medusa", "train Medusa heads for a dense target"))
    _add_redrafter_arguments(stage("redrafter", "train a ReDrafter head for a dense target"))
    _add_block_arguments(stage("block", "train a block drafter (DFlash, DFlash 2, DSpark) for a dense target"))
    return parser


def _add_regenerate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="JSON lines: messages, ShareGPT, or {prompt}"
    )
    parser.add_argument("--url", required=True, help="http://HOST:PORT/v1 of a server with return_token_ids")
    parser.add_argument("--out", type=Path, required=True, help="the token rows; run again to go on after a kill")
    parser.add_argument("--api-key", metavar="KEY", help="better set EAGLE_SERVER_API_KEY, as ps shows flags")
    parser.add_argument("--model", help="its name (not given: the first that the server names)")
    parser.add_argument("--concurrency", type=int, default=32, help="conversations at once (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0], metavar="T", help="of the conversations in turn (0)"
    )
    parser.add_argument("--max-tokens", type=int, help="of an answer (not given: until the context is full)")
    parser.add_argument(
        "--sampling", metavar="JSON", help='more of each request, such as {"top_p": 0.8, "reasoning_effort": "low"}'
    )
    parser.add_argument("--chat-template-kwargs", metavar="JSON", help="variables of the chat template")
    parser.add_argument("--keep-thinking", action="store_true", help="send earlier thinking with the history")
    parser.add_argument("--ignore", nargs="+", default=[], metavar="KEY", help="keys of rows that say nothing")


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="PATH", help="directory or Hub id to serve, with --head")
    parser.add_argument("--head", metavar="PATH", help="directory or Hub id of the head")
    parser.add_argument(
        "--serve", default="", metavar="FLAGS", help='more flags of that server: "--topk 1 --speculative-num-steps 3"'
    )
    parser.add_argument("--url", help="of a running server, instead of --target and --head")
    parser.add_argument("--api-key", metavar="KEY", help="better set EAGLE_SERVER_API_KEY, as ps shows flags")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSON lines of conversations, a set each")
    parser.add_argument("--concurrency", type=int, default=1, help="conversations at once (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the answers (0)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (%(default)s)")
    parser.add_argument("--sampling", metavar="JSON", help="more of each request")
    parser.add_argument("--no-plain", action="store_true", help="without the second pass that drafts nothing")
    parser.add_argument("--ignore", nargs="+", default=[], metavar="KEY", help="keys of rows that say nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_capture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="directory, GGUF file or Hub id of any target that is served")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="files of token rows")
    parser.add_argument("--out", type=Path, required=True, help="the features; run again to go on after a kill")
    parser.add_argument(
        "--aux-layers", type=int, nargs="+", metavar="B", help="streams to write, B = after B layers (EAGLE-3's)"
    )
    parser.add_argument(
        "--length", type=int, default=ROW_LENGTH, help="rows are cut after one more token (%(default)s)"
    )
    parser.add_argument("--max-gb", type=float, metavar="GB", help="refuse rows that take more disk (what is free)")


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSON lines: chats, token rows or texts")
    parser.add_argument("--model-path", required=True, help="whose tokenizer, chat template and end-of-sequence ids")
    parser.add_argument("--out", type=Path, required=True, help="the token rows, as JSON lines")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file (not given: the model's own)")
    parser.add_argument("--chat-template-kwargs", metavar="JSON", help="its variables, as the server will be asked")
    parser.add_argument(
        "--preformatted", action="store_true", help="rows are {text}, or {prompt, completion}, that need no template"
    )
    parser.add_argument("--ignore", nargs="+", default=[], metavar="KEY", help="keys of rows that say nothing")


def _add_token_map_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True, help="whose vocabulary, special and end-of-sequence ids")
    parser.add_argument("--data", type=Path, nargs="+", help="token rows; what the model generated is counted")
    parser.add_argument("--text", type=Path, nargs="+", help="text files or directories of them, for base models")
    parser.add_argument("--size", type=int, required=True, metavar="N", help="tokens of the map, special ones included")
    parser.add_argument("--out", type=Path, required=True, help="the file for --speculative-token-map")


def _add_common_arguments(parser: argparse.ArgumentParser, default: AnyRecipe) -> None:
    """The options that every head's training has."""
    parser.add_argument("--target", required=True, help="checkpoint directory or Hub id of a dense target")
    parser.add_argument("--out", type=Path, required=True, help="where the head is written; training/ below it resumes")
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        help="token rows, or text files or directories of them, no chats (not given: Python's standard library)",
    )
    parser.add_argument(
        "--features", type=Path, help="what `capture` wrote, in the place of --data: the target is not computed"
    )
    parser.add_argument(
        "--steps", type=int, default=default.steps, help="training steps of about 6144 rows (%(default)s)"
    )
    parser.add_argument("--peak", type=float, default=default.peak, help="highest learning rate (%(default)s)")
    parser.add_argument(
        "--length",
        type=int,
        help=f"tokens per text, one in eight is longer ({default.length}); of token rows per window ({ROW_LENGTH})",
    )
    parser.add_argument("--texts", type=int, default=default.texts, help="maximum per step (%(default)s)")
    parser.add_argument(
        "--loss",
        choices=LOSS_NAMES,
        default=default.loss,
        help="kl: soft-label cross-entropy; above temperature 0, tv: for chains, coupled: for trees (%(default)s)",
    )
    parser.add_argument(
        "--accumulate", type=int, default=default.accumulate, help="such steps per update of the weights (%(default)s)"
    )
    parser.add_argument("--init", metavar="HEAD", help="directory or Hub id of a head to train on; it has all sizes")
    parser.add_argument(
        "--sampled-texts",
        type=int,
        default=default.sampled_texts,
        help="texts the target writes to train on, beside a corpus (%(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto: a GPU if there is one (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile (some minutes at first, then faster)")


def _add_head_arguments(parser: argparse.ArgumentParser) -> None:
    default = Recipe()
    _add_common_arguments(parser, default)
    parser.add_argument(
        "--kind", choices=("eagle3", "eagle"), default=default.kind, help="the head's format (%(default)s)"
    )
    _add_step_arguments(parser, default)
    parser.add_argument("--draft-vocab", type=int, help="only the most frequent tokens are drafted (EAGLE-3)")
    parser.add_argument("--ffn", type=int, help="width of the head's MLP (not given: the target's)")
    parser.add_argument(
        "--aux-layers", type=int, nargs="+", metavar="B", help="boundaries to read, B = after B layers (EAGLE-3)"
    )


def _add_mtp_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common_arguments(parser, MTP)
    _add_step_arguments(parser, MTP)


def _add_step_arguments(parser: argparse.ArgumentParser, default: Recipe) -> None:
    """The options of heads that are trained on their own output."""
    parser.add_argument("--passes", type=int, default=default.passes, help="draft steps that are trained (%(default)s)")
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


if __name__ == "__main__":
    sys.exit(main())
