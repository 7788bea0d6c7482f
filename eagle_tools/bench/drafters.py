"""python -m eagle_tools.bench.drafters: the demo with each of its drafters, on repetitive and ordinary text."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from eagle_server.engine.engine import Engine
from eagle_server.speculation.static_tree import PRESETS
from eagle_tools.bench.demo import Tally, demo_engine, held_out, measure
from eagle_tools.bench.rich_output import Console, Table

SETTLING = 160  # tokens after which the demo's greedy answers repeat themselves
UNCOUPLED = " uncoupled"  # after the name of a drafter that ranks by probability alone

Builders = dict[str, Callable[[], Engine]]


def kinds(ordinary: list[list[int]], engine: Engine) -> dict[str, list[list[int]]]:
    """Prompts of each kind: long repetitive answers to continue, held-out text, and both alternately."""
    repetitive = [
        prompt + measure(engine, str(number), prompt, SETTLING, Tally()) for number, prompt in enumerate(ordinary)
    ]
    mixed = [(repetitive, ordinary)[number % 2][number] for number in range(len(ordinary))]
    return {"repetitive": repetitive, "ordinary": ordinary, "mixed": mixed}


def engines(steps: int, topk: int, nodes: int, threads: int) -> Builders:
    """The demo with each drafter, coupled and uncoupled; all trees have the same size."""
    size = ["--speculative-num-draft-tokens", str(nodes)]
    tree = ["--speculative-num-steps", str(steps), "--topk", str(topk), *size]
    # The published list has the most useful nodes first, so its beginning is a good smaller tree.
    choices = ["--medusa-choices", str(list(PRESETS["mc_sim_7b_63"][: nodes - 1]))]
    options = {
        "NONE": [],
        "EAGLE3": tree,
        "MEDUSA": choices,
        "REDRAFTER": tree,
        "DFLASH": tree,
        "NGRAM": size,
        "EAGLE3+NGRAM": tree,
        "MEDUSA+NGRAM": choices,
        "REDRAFTER+NGRAM": tree,
        "DFLASH+NGRAM": tree,
    }
    built: Builders = {}
    for name, flags in options.items():
        built[name] = partial(demo_engine, name, *flags, threads=threads)
        if name != "NONE":
            built[name + UNCOUPLED] = partial(
                demo_engine, name, *flags, "--speculative-coupling", "off", threads=threads
            )
    return built


def compare(
    builders: Mapping[str, Callable[[], Engine]],
    texts: Mapping[str, Sequence[Sequence[int]]],
    max_tokens: int,
    temperature: float,
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
                measure(
                    engine,
                    str(number),
                    prompt,
                    max_tokens,
                    tallies[kind, name],
                    temperature=temperature,
                    seed=number,
                )
                for name, engine in running.items()
            ]
            departures += sum(answer != answers[0] for answer in answers)
    return tallies, departures


def print_table(tallies: Mapping[tuple[str, str], Tally], temperature: float, console: Console) -> None:
    """A row per kind of text and drafter. Greedy requests have no uncoupled twin: coupling does not concern them."""
    table = Table(title=f"decoding alone, temperature {temperature:g}, one request at a time")
    uncoupled = ("uncoupled",) if temperature else ()
    for column in ("text", "drafter", "accept length", "tokens per forward", *uncoupled, "tokens/s", "to plain"):
        table.add_column(column, justify="left" if column in ("text", "drafter") else "right")
    for (kind, name), tally in tallies.items():
        if name.endswith(UNCOUPLED):
            continue
        speed, plain, twin = tally.tokens / tally.seconds, tallies[kind, "NONE"], tallies.get((kind, name + UNCOUPLED))
        table.add_row(
            kind,
            name,
            f"{tally.accept_length:.2f}",
            f"{tally.tokens_per_forward:.2f}",
            *((f"{twin.tokens_per_forward:.2f}" if twin else "",) if uncoupled else ()),
            f"{speed:.0f}",
            f"{speed / plain.tokens * plain.seconds:.2f}",
            end_section=name == list(tallies)[-1][1].removesuffix(UNCOUPLED),
        )
    console.print(table)


def main(argv: Sequence[str]) -> int:
    """Run the comparison; returns 0, or 1 if an answer differs from plain decoding."""
    parser = argparse.ArgumentParser(prog="python -m eagle_tools.bench.drafters", description=__doc__)
    parser.add_argument("--drafters", nargs="+", metavar="NAME", help="compare these with plain decoding (all)")
    parser.add_argument("--prompts", type=int, default=16, help="how many of the demo's 32 held-out prompts (16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per answer (96)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (1)")
    parser.add_argument("--steps", type=int, default=5, help="depth of the head's tree (5)")
    parser.add_argument("--topk", type=int, default=4, help="topk of the head's tree (4)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes verified at once, for every drafter (8)")
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0],
        help="of the requests; above 0 drafters also run uncoupled, ranking by probability alone (0)",
    )
    arguments = parser.parse_args(argv)
    builders = engines(arguments.steps, arguments.topk, arguments.nodes, arguments.threads)
    compared = {"NONE", *(arguments.drafters or builders)}
    if unknown := compared - set(builders):
        parser.error(f"--drafters: {', '.join(sorted(unknown))}: choose from {', '.join(builders)}")
    texts = kinds(held_out(arguments.prompts), builders["EAGLE3+NGRAM"]())
    departures = answers = 0
    for temperature in arguments.temperature:
        chosen = {
            name: builder
            for name, builder in builders.items()
            if (temperature or not name.endswith(UNCOUPLED)) and name.removesuffix(UNCOUPLED) in compared
        }
        tallies, departed = compare(chosen, texts, arguments.max_tokens, temperature)
        print_table(tallies, temperature, Console(width=110))
        departures, answers = departures + departed, answers + len(tallies) * arguments.prompts
    print(f"answers that are the plain ones: {answers - departures} of {answers}")
    return int(departures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
