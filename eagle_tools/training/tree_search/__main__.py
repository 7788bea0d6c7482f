"""`python -m eagle_tools.training.tree_search`: find a static tree by measuring the draft on text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eagle_server.config import parse_args
from eagle_server.config.commands import CommandParser, count, flags_of, temperature
from eagle_server.text.tokenizer import load_tokenizer
from eagle_tools.training.tree_search.counts import LEAST_TRIES
from eagle_tools.training.tree_search.growth import Accuracies, expected_tokens, grow
from eagle_tools.training.tree_search.picture import draw_choices
from eagle_tools.training.tree_search.report import (
    Findings,
    print_accuracies,
    print_costs,
    print_trials,
    write_choices,
    write_json,
)
from eagle_tools.training.tree_search.search import Candidate, check, measure_accuracies, time_shallower, time_sizes
from eagle_tools.training.tree_search.texts import prompts_of
from eagle_tools.training.tree_search.tree_engines import Task, TreeEngines, add_model_options, model_flags

CHECKED = 4  # one text in 4 is kept for the check
TABLE_WIDTH = 110

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
  python -m eagle_server --speculative-token-tree demo-tree/choices.txt
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
    try:
        run(options, [*model_flags(options), *flags])
    except (OSError, ValueError) as error:
        print(f"eagle_server: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Measure, choose, check, write and print.

    Raises:
        ValueError: the measurement is not possible; the message says what to change.
        OSError: a file that cannot be read or written.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    config = parse_args(flags, environ={})
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.target_path)
    prompts = prompts_of(options.data, tokenizer, options.texts)
    kept = prompts[CHECKED - 1 :: CHECKED]
    task = Task(
        [prompt for place, prompt in enumerate(prompts) if place % CHECKED != CHECKED - 1],
        options.max_tokens,
        options.temperature,
        options.batch,
    )
    engines = TreeEngines(flags, task, options.depth, options.ranks, options.nodes or 0)
    counts = measure_accuracies(engines)
    accuracies = counts.accuracies()
    if not any(map(any, accuracies)):
        raise ValueError(
            f"no guess was accepted in {counts.cycles} cycles, or too few were made: {LEAST_TRIES} count; "
            "take more --texts or --max-tokens, or another draft"
        )
    timed, chosen = _choose(engines, accuracies, options)
    checked = dataclasses.replace(task, prompts=kept)
    trials = check(engines, checked, accuracies, chosen) if engines.option is not None and kept else []
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    settings["data"] = None if options.data is None else [str(path) for path in options.data]
    settings["flags"] = list(flags)
    _tell(Findings(engines.algorithm, engines.option, counts, accuracies, chosen, timed, trials, settings), options)


def _choose(
    engines: TreeEngines, accuracies: Accuracies, options: argparse.Namespace
) -> tuple[list[list[Candidate]], Candidate]:
    """All timed candidates, in groups, and the chosen one: of size --nodes, or else the fastest of the last group."""
    timed = [time_sizes(engines, accuracies, options.rounds, options.nodes)]
    if options.nodes is None and engines.option is not None:
        timed.append(time_shallower(engines, accuracies, timed[0], options.rounds))
    drafting = [candidate for candidate in timed[-1] if candidate.nodes]
    if options.nodes is None:
        return timed, max(drafting, key=lambda candidate: candidate.speed)
    return timed, next((c for c in drafting if c.nodes == options.nodes), drafting[-1])


def _tell(findings: Findings, options: argparse.Namespace) -> None:
    console, chosen = Console(width=TABLE_WIDTH), findings.chosen
    print_accuracies(findings, console)
    print_costs(findings, console, options.batch)
    if findings.trials:
        print_trials(findings, console)
    choices = chosen.choices or tuple(grown.choice for grown in grow(findings.accuracies, chosen.nodes))
    expected = expected_tokens(findings.accuracies, choices)
    what = f"{len(choices)} nodes for {findings.algorithm}, {expected:.2f} tokens per cycle expected"
    measured = f"from {findings.counts.cycles} cycles at temperature {options.temperature:g}"
    write_choices(options.out / "choices.txt", choices, f"{what}, {measured}")
    draw_choices(choices, findings.accuracies, f"A static tree of {what}", measured, options.out / "tree")
    write_json(
        options.out / "measurements.json",
        dataclasses.replace(findings, chosen=dataclasses.replace(chosen, choices=choices)),
    )
    if options.nodes is not None and len(choices) < options.nodes:
        print(f"only {len(choices)} nodes: no more were ever accepted often enough; more --texts or --ranks may help")
    print(f"{options.out}: choices.txt, measurements.json, tree.png, tree.svg")
    if findings.option is None:
        print(
            f"{findings.algorithm} makes its trees from each request: it cannot serve choices.txt, which is to compare."
        )
        verb = "was the fastest that was timed" if options.nodes is None else "is what --nodes asked for"
        print(f"Of its own trees --speculative-num-draft-tokens {chosen.nodes + 1} {verb}.")
        return
    print(f"serve it with {findings.option} {options.out / 'choices.txt'}")
    plain = next(candidate.speed for candidate in findings.timed[-1] if not candidate.nodes)
    if chosen.speed < plain:
        print("but plain decoding was faster than every tree: --speculative-algorithm NONE")


def _parser() -> CommandParser:
    parser = CommandParser("python -m eagle_tools.training.tree_search", _ABOUT, _EXAMPLES)
    add_model_options(parser)
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


if __name__ == "__main__":
    sys.exit(main())
