"""`python -m eagle_tools.training.tree_search`: find a static tree by measuring the draft on text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_server.config.commands import CommandParser, count, flags_of, temperature
from eagle_tools import require_extra

_ABOUT = """\
Find the best static draft tree for a draft, your text and this machine.

A static tree lists its nodes by rank: (0, 2) is the third guess for the token after the next, below the first guess
for the next. Which nodes are worth verifying depends on how often the draft's guesses are right. So this command

  1. continues the prompts of --data with the target and the draft, under trees as wide as possible. For each depth and
     rank it counts how often the guess was the target's own draw, given that its parent was accepted: the accuracy.
     Children of refused nodes are not tried, so they do not count;
  2. grows the tree. The worth of a node is the product of the accuracies on its path. The expected number of tokens
     per cycle is 1 + the worth of all nodes (Medusa, arXiv 2401.10774, section 2.3.3). The N nodes of largest worth
     are the best tree of N nodes;
  3. times a cycle, drafting and verifying, with trees of several sizes. More nodes give more tokens per cycle, but
     each node gives less, and cycles take longer. Without --nodes, the tree with most tokens per second is chosen;
  4. serves the tree on texts that were not used to grow it (one in four), and compares it with trees of the same size
     that use no measurement.

It writes to --out: choices.txt for the server, tree.png and tree.svg, and measurements.json with every count. The
output of a request is the same with any tree; only the speed differs."""

_EXAMPLES = """\
examples:
  python -m eagle_tools.training.tree_search --out demo-tree
      for the embedded demo; then, to serve it:
  eagle-server --speculative-token-tree demo-tree/choices.txt
  python -m eagle_tools.training.tree_search --target meta-llama/Llama-3.1-8B-Instruct \\
      --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --data prompts.json --batch 8 --out llama-tree
      for your own pair and batches of eight requests: the larger the batch, the smaller the best tree
  python -m eagle_tools.training.tree_search --target T --draft MEDUSA_HEADS --data texts/ --nodes 63 --out tree
      then serve it with --medusa-choices tree/choices.txt
  python -m eagle_tools.training.tree_search --algorithm NGRAM --out ngrams
      for drafters that make their trees per request (NGRAM, REDRAFTER, mixtures): it measures what they propose and
      which size is fastest; it draws a static tree for comparison, but these drafters cannot serve one

options of the model and the device are those of the server, such as --dtype, --device, --cpu-threads"""


def main(argv: Sequence[str] | None = None) -> int:
    """Search; returns 0, or 2 after one line that says what is wrong."""
    shape = ("num-steps", "eagle-topk", "num-draft-tokens", "token-tree", "medusa-choices")
    refused = dict.fromkeys(flags_of("server", "scheduler", "cache"), "nothing is served here")
    refused |= dict.fromkeys(
        [*(f"--speculative-{name}" for name in shape), "--topk", "--medusa-choices"],
        "the tree is what is searched for; --depth, --ranks and --nodes bound it",
    )
    refused["--acceptance"] = refused["--speculative-acceptance"] = "what is counted here are the target's own draws"
    options, flags = _parser().split(sys.argv[1:] if argv is None else argv, refused)
    require_extra("tree_search")
    from eagle_tools.training.tree_search.choosing import choose_tree  # imports torch, which --help does not need

    try:
        choose_tree(options, [*_model_flags(options), *flags])
    except (OSError, ValueError) as error:
        print(f"eagle_server: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("python -m eagle_tools.training.tree_search", _ABOUT, _EXAMPLES)
    _add_model_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results are written")
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="JSON lists of prompts, other text files, which are cut into prompts, or directories of them (not given: "
        "the demo's held-out prompts, Python source)",
    )
    parser.add_argument("--texts", type=count, default=32, metavar="N", help="prompts to use (%(default)s)")
    parser.add_argument("--max-tokens", type=count, default=64, metavar="N", help="tokens after each (%(default)s)")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="of the draws (0: greedy)")
    parser.add_argument(
        "--nodes", type=count, metavar="N", help="drafted nodes, the root not counted (not given: the fastest)"
    )
    parser.add_argument("--depth", type=count, default=5, metavar="N", help="deepest node (%(default)s)")
    parser.add_argument("--ranks", type=count, default=8, metavar="N", help="guesses tried per parent (%(default)s)")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="requests that decode together (1)")
    parser.add_argument("--rounds", type=count, default=40, metavar="N", help="cycles timed per tree (%(default)s)")
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options of the server under the names that the other trainings use."""
    parser.add_argument("--target", "--model-path", metavar="TARGET", help="Hub id or directory (not given: the demo)")
    parser.add_argument(
        "--draft", "--speculative-draft-model-path", metavar="HEAD", help="its draft head (the demo brings its own)"
    )
    parser.add_argument(
        "--algorithm", "--speculative-algorithm", metavar="NAME", help="if it does not follow from the head's files"
    )


def _model_flags(options: argparse.Namespace) -> list[str]:
    """The options of `_add_model_options` as the server's flags."""
    named = {
        "--model-path": options.target,
        "--speculative-draft-model-path": options.draft,
        "--speculative-algorithm": options.algorithm,
    }
    return [text for flag, value in named.items() if value is not None for text in (flag, value)]


if __name__ == "__main__":
    sys.exit(main())
