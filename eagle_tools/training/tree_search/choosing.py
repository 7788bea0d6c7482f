"""The search from its options to its files: measure, choose, check, write and print."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eagle_server.config import parse_args
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
from eagle_tools.training.tree_search.tree_engines import Task, TreeEngines

CHECKED = 4  # one text in 4 is kept for the check
TABLE_WIDTH = 110


def choose_tree(options: argparse.Namespace, flags: Sequence[str]) -> None:
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
