"""The results of the search as files and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle_tools.training.tree_search.counts import LEAST_TRIES, RankCounts
from eagle_tools.training.tree_search.growth import Accuracies, Choice
from eagle_tools.training.tree_search.search import Candidate, Trial


@dataclass(frozen=True)
class Findings:
    """All results. `option` is the server's option for the tree, None if the drafter cannot serve it."""

    algorithm: str
    option: str | None
    counts: RankCounts
    accuracies: Accuracies
    chosen: Candidate
    timed: Sequence[Sequence[Candidate]]  # in groups that were timed together
    trials: Sequence[Trial]
    settings: dict[str, Any]


def write_choices(path: Path, choices: Sequence[Choice], comment: str) -> None:
    """Write the tree in the format of the server's options, one line per depth."""
    ordered = sorted(choices, key=lambda choice: (len(choice), choice))
    levels = [[c for c in ordered if len(c) == depth] for depth in range(1, len(ordered[-1]) + 1)]
    lines = ",\n ".join(", ".join(map(str, level)) for level in levels)
    path.write_text(f"# {comment}\n[{lines}]\n", encoding="utf-8")


def write_json(path: Path, findings: Findings) -> None:
    """Write counts, accuracies, costs and checks; times are in seconds."""
    counts = findings.counts
    content = {
        "algorithm": findings.algorithm,
        "served_by": findings.option,
        "settings": findings.settings,
        "choices": [list(choice) for choice in findings.chosen.choices],
        "expected_tokens_per_cycle": findings.chosen.expected,
        "accuracy": {
            "by": "[depth][rank], given that the parent was accepted; tries below least_tries count as 0",
            "least_tries": LEAST_TRIES,
            "used": [[round(value, 6) for value in row] for row in findings.accuracies],
            "hits": counts.hits,
            "tried": counts.tried,
            "accepted_parents_with_nothing_drafted_below": counts.leaves,
            "cycles": counts.cycles,
            "tokens": counts.emitted,
        },
        "costs": [[_cost(candidate) for candidate in group] for group in findings.timed],
        "check": [trial.__dict__ for trial in findings.trials],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _cost(candidate: Candidate) -> dict[str, Any]:
    return {
        "nodes": candidate.nodes,
        "depth": candidate.steps,
        "tokens_per_cycle": candidate.tokens,
        "tokens_are": "measured" if candidate.expected is None else "expected",
        "median_seconds": candidate.cost.seconds,
        "cycles_timed": len(candidate.cost.times),
        "tokens_per_second": candidate.speed,
    }


def print_accuracies(findings: Findings, console: Console) -> None:
    table = Table(title="accuracy: the child of this rank is the target's draw, given that its parent was accepted")
    table.add_column("depth")
    for rank in range(len(findings.accuracies[0])):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("tries", justify="right")
    table.add_column("nothing below", justify="right")
    for depth, (hits, tried) in enumerate(zip(findings.counts.hits, findings.counts.tried, strict=True)):
        cells = [f"{h / t:.3f}" if t >= LEAST_TRIES else f"({h}/{t})" for h, t in zip(hits, tried, strict=True)]
        table.add_row(str(depth + 1), *cells, str(max(tried)), str(findings.counts.leaves[depth]))
    console.print(table)


def print_costs(findings: Findings, console: Console, batch: int) -> None:
    what = "expected" if findings.option is not None else "measured"
    table = Table(title=f"cost on this machine, {batch} request{'s' if batch > 1 else ''} at a time (medians)")
    for column in ("nodes", "depth", f"tokens per cycle, {what}", "cycle, ms", "tokens/s", "to plain", ""):
        table.add_column(column, justify="right")
    for group in findings.timed:  # the candidates of a group were timed together
        plain = next(candidate.speed for candidate in group if not candidate.nodes)
        for candidate in group:
            mark = "chosen" if candidate is findings.chosen else "plain" if not candidate.nodes else ""
            table.add_row(
                str(candidate.nodes),
                str(candidate.steps),
                f"{candidate.tokens:.2f}",
                f"{candidate.cost.seconds * 1e3:.2f}",
                f"{candidate.speed:.0f}",
                f"{candidate.speed / plain:.2f}",
                mark,
                style="bold green" if mark == "chosen" else None,
                end_section=candidate is group[-1],
            )
    console.print(table)


def print_trials(findings: Findings, console: Console) -> None:
    table = Table(title=f"check: {findings.chosen.nodes} nodes on texts that were not calibrated on, tokens per cycle")
    for column in ("tree", "expected", "measured", "cycles"):
        table.add_column(column, justify="left" if column == "tree" else "right")
    for trial in findings.trials:
        expected = "" if trial.expected is None else f"{trial.expected:.2f}"
        table.add_row(trial.name, expected, f"{trial.tokens:.2f}", str(trial.cycles))
    console.print(table)
