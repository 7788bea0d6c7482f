"""python -m eagle_server.bench.drafters: the demo with each of its drafters, on repetitive and ordinary text."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from eagle_server.bench.demo import Tally, demo_engine, held_out, measure
from eagle_server.engine.engine import Engine
from eagle_server.speculation.static_tree import PRESETS

SETTLING = 160  # tokens after which the demo's greedy answers repeat themselves


def kinds(ordinary: list[list[int]], engine: Engine) -> dict[str, list[list[int]]]:
    """Prompts of each kind: long repetitive answers to continue, held-out text, and both alternately."""
    repetitive = [
        prompt + measure(engine, str(number), prompt, SETTLING, Tally()) for number, prompt in enumerate(ordinary)
    ]
    mixed = [(repetitive, ordinary)[number % 2][number] for number in range(len(ordinary))]
    return {"repetitive": repetitive, "ordinary": ordinary, "mixed": mixed}


def engines(num_steps: int, topk: int, num_draft_tokens: int, threads: int) -> dict[str, Callable[[], Engine]]:
    """The demo with each drafter; all trees have the same size."""
    size = ["--speculative-num-draft-tokens", str(num_draft_tokens)]
    tree = ["--speculative-num-steps", str(num_steps), "--topk", str(topk), *size]
    # The published list has the most useful nodes first, so its beginning is a good smaller tree.
    choices = ["--medusa-choices", str(list(PRESETS["mc_sim_7b_63"][: num_draft_tokens - 1]))]
    options = {
        "NONE": [],
        "EAGLE3": tree,
        "MEDUSA": choices,
        "REDRAFTER": tree,
        "NGRAM": size,
        "EAGLE3+NGRAM": tree,
        "MEDUSA+NGRAM": choices,
        "REDRAFTER+NGRAM": tree,
    }
    return {name: partial(demo_engine, name, *own, threads=threads) for name, own in options.items()}


def compare(
    builders: Mapping[str, Callable[[], Engine]], texts: Mapping[str, Sequence[Sequence[int]]], max_tokens: int
) -> tuple[dict[tuple[str, str], Tally], int]:
    """Run every drafter on every kind of text, alternating at each prompt; also returns the number of changed answers.

    An engine serves one kind of text only, so that a mixture cannot use what it learned from another kind.
    """
    tallies = {key: Tally() for key in itertools.product(texts, builders)}
    departures = 0
    for kind, prompts in texts.items():
        running = {name: build() for name, build in builders.items()}
        for engine in running.values():
            measure(engine, "warm-up", prompts[0][:16], 8, Tally())
        for number, prompt in enumerate(prompts):
            answers = [
                measure(engine, str(number), prompt, max_tokens, tallies[kind, name])
                for name, engine in running.items()
            ]
            departures += sum(answer != answers[0] for answer in answers)
    return tallies, departures


def print_table(tallies: Mapping[tuple[str, str], Tally], console: Console) -> None:
    table = Table(title="decoding alone, greedy, one request at a time")
    for column in ("text", "drafter", "accept length", "tokens per forward", "tokens/s", "to plain"):
        table.add_column(column, justify="left" if column in ("text", "drafter") else "right")
    for (kind, name), tally in tallies.items():
        speed, plain = tally.tokens / tally.seconds, tallies[kind, "NONE"]
        table.add_row(
            kind,
            name,
            f"{tally.accept_length:.2f}",
            f"{tally.tokens_per_forward:.2f}",
            f"{speed:.0f}",
            f"{speed / plain.tokens * plain.seconds:.2f}",
            end_section=name == "REDRAFTER+NGRAM",
        )
    console.print(table)


def main(argv: Sequence[str]) -> int:
    """Run the comparison; returns 0, or 1 if an answer differs from plain decoding."""
    parser = argparse.ArgumentParser(prog="python -m eagle_server.bench.drafters", description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="how many of the demo's 32 held-out prompts (16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per answer (96)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (1)")
    parser.add_argument("--steps", type=int, default=5, help="depth of the head's tree (5)")
    parser.add_argument("--topk", type=int, default=4, help="topk of the head's tree (4)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes verified at once, for every drafter (8)")
    arguments = parser.parse_args(argv)
    builders = engines(arguments.steps, arguments.topk, arguments.nodes, arguments.threads)
    texts = kinds(held_out(arguments.prompts), builders["EAGLE3+NGRAM"]())
    tallies, departures = compare(builders, texts, arguments.max_tokens)
    print_table(tallies, Console(width=96))
    answers = len(tallies) * arguments.prompts
    print(f"answers that are the plain ones: {answers - departures} of {answers}")
    return int(departures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
