"""python -m eagle_tools.bench.adaptive: plain decoding, trees that follow cost and load, and trees of fixed sizes.

Three parts. `clients`: throughput by number of clients, every server in turn. `mixed`: requests of several kinds that
arrive at random, plain against adaptive. `trees`: tokens per forward of fixed chains and trees, one request at a time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eagle_server.engine.engine import Engine
from eagle_tools.bench.demo import FIXED, Tally, demo_engine, held_out
from eagle_tools.bench.demo import measure as measure_alone
from eagle_tools.bench.load import Arrival, Measurement, Workload, answer_arrivals, measure
from eagle_tools.bench.report import (
    PLAIN,
    equal_texts,
    plot_ratios,
    ratios,
    rows_of,
    stream_times,
    write_json,
)
from eagle_tools.bench.rich_output import Console, Progress, Table
from eagle_tools.bench.servers import BenchError, Server, running


def _fixed(steps: int, topk: int, nodes: int) -> dict[str, tuple[str, ...]]:
    sizes = ("--speculative-num-steps", str(steps), "--topk", str(topk), "--speculative-num-draft-tokens", str(nodes))
    return {f"fixed ({steps}, {topk}, {nodes})": (*sizes, *FIXED)}


ADAPTIVE = "adaptive"
SERVERS = {
    PLAIN: ("--speculative-algorithm", "NONE"),
    ADAPTIVE: (),
    **_fixed(2, 2, 4),
    **_fixed(5, 4, 8),
    **_fixed(3, 4, 13),
}
# Each chain is followed by a tree with as many rows and levels.
TREES = {
    **_fixed(3, 1, 4),
    **_fixed(3, 4, 4),
    **_fixed(7, 1, 8),
    **_fixed(7, 4, 8),
    **_fixed(12, 1, 13),
    **_fixed(12, 4, 13),
    **_fixed(5, 4, 8),
    **_fixed(3, 4, 13),
    **{f"{label}, not coupled": (*flags, "--speculative-coupling", "off") for label, flags in _fixed(3, 4, 13).items()},
}
AT_ONCE, ARRIVING = "all at once", "arriving"
PARTS = ("clients", "mixed", "trees")
CLIENTS, QUICK_CLIENTS = (1, 2, 4, 8, 16, 32, 48), (1, 8, 32)
TREE_TEMPERATURES = (0.0, 0.7, 1.0)
SHORTEST, LONGEST = 20, 900  # prompt tokens of the mixed load
MOST_TOKENS = 96  # in an answer of the mixed load
UTILISATION = 0.7  # arrivals of the mixed load, as a share of what plain answers if all come at once


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.adaptive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer clients, rounds, requests and tokens")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (everything)")
    parser.add_argument("--clients", type=int, nargs="+", metavar="N", help="client counts (1 2 4 8 16 32 48)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of the clients (0 1)")
    parser.add_argument("--max-tokens", type=int, help="tokens per answer, except in the mixed load (64)")
    parser.add_argument("--rounds", type=int, help="rounds per server, alternating (3)")
    parser.add_argument("--requests", type=int, help="requests of the mixed load (64)")
    parser.add_argument("--prompts", type=int, help="prompts of the trees, least requests of a round (16)")
    parser.add_argument(
        "--server", action="append", default=[], metavar="LABEL=FLAGS", help="add a server, or change one's flags"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON and PNG")
    return parser


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    arguments = _parser().parse_args(argv)
    usual = {"clients": CLIENTS, "max_tokens": 64, "rounds": 3, "requests": 64, "prompts": 16}
    quick = {"clients": QUICK_CLIENTS, "max_tokens": 32, "rounds": 1, "requests": 24, "prompts": 8}
    for name, value in (quick if arguments.quick else usual).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run the parts; returns 0, 1 if an answer differs from plain's, or 2 with one line on stderr."""
    arguments = _arguments(argv)
    pairs = (text.partition("=") for text in arguments.server)
    servers = SERVERS | {label: tuple(shlex.split(flags)) for label, _, flags in pairs}
    console, results, differing = Console(width=110), dict[str, Any](), 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            up = _start(servers, arguments.parts, stack)
            if "clients" in arguments.parts:
                by_temperature = _measure_clients(up, arguments, console)
                costs = _costs(up)
                differing += _report_clients(by_temperature, costs, results, arguments.out, console)
            if "mixed" in arguments.parts:
                differing += _mixed(up, arguments, results, console)
        if "trees" in arguments.parts:
            differing += _trees(arguments, results, console)
    except (BenchError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    finally:
        if results:
            flags = {label: shlex.join(parts) for label, parts in servers.items()}
            write_json(arguments.out / "adaptive.json", vars(arguments) | {"servers": flags}, results)
            console.print(f"written: {arguments.out / 'adaptive.json'}")
    return int(differing > 0)


def _start(servers: Mapping[str, Sequence[str]], parts: Sequence[str], stack: ExitStack) -> list[Server]:
    """Start the servers that the parts need, one after the other: each may measure its costs while it starts."""
    labels = list(servers) if "clients" in parts else [PLAIN, ADAPTIVE] if "mixed" in parts else []
    # With the prefix cache, the later of two equal rounds would find its prompts there.
    return [stack.enter_context(running(label, [*servers[label], "--disable-radix-cache"])) for label in labels]


def _costs(servers: Sequence[Server]) -> dict[str, Any]:
    """The cost model of the adaptive server."""
    state = next(server for server in servers if server.label == ADAPTIVE).stats()["speculation"]
    if state is None:
        raise BenchError(f"the trees of {ADAPTIVE!r} do not follow the load: /v1/server_info shows no costs")
    return dict(state["costs"])


def _measure_clients(
    servers: Sequence[Server], arguments: argparse.Namespace, console: Console
) -> dict[float, list[Measurement]]:
    """All servers in turn, at every temperature and number of clients."""
    measurements: dict[float, list[Measurement]] = {temperature: [] for temperature in arguments.temperatures}
    with Progress(console=console) as progress:
        runs = len(measurements) * len(arguments.clients) * (arguments.rounds + 1) * len(servers)
        task = progress.add_task("clients", total=runs)
        for temperature, clients in itertools.product(measurements, arguments.clients):
            prompts = _cycled(max(2 * clients, arguments.prompts))
            workload = Workload(prompts, arguments.max_tokens, temperature)
            for turn in range(arguments.rounds + 1):
                first = turn % len(servers)
                for server in (*servers[first:], *servers[:first]):
                    result = measure(server, workload, clients)
                    progress.advance(task)
                    if turn > 0:  # the first round only warms up
                        measurements[temperature].append(result)
    return measurements


def _cycled(count: int) -> tuple[list[int], ...]:
    prompts = held_out(count)
    return tuple(prompts[number % len(prompts)] for number in range(count))


def _report_clients(
    by_temperature: Mapping[float, Sequence[Measurement]],
    costs: Mapping[str, Any],
    results: dict[str, Any],
    out: Path,
    console: Console,
) -> int:
    """Print, draw and keep the ratios to plain, and the adaptive server's cost model.

    Returns how many answers differ from plain's.
    """
    panels, differing = {}, 0
    for temperature, measurements in by_temperature.items():
        title, rows = f"temperature {temperature:g}", rows_of(measurements)
        panel = {label: ratios(measurements, label) for label in dict.fromkeys(m.label for m in measurements)}
        del panel[PLAIN]
        table = Table(title=f"throughput, {title}: plain in tokens/s, the others as ratios to it")
        table.add_column("clients")
        for clients in dict.fromkeys(row.concurrency for row in rows):
            table.add_column(str(clients), justify="right")
        table.add_column("texts of plain", justify="right")
        table.add_row(PLAIN, *(f"{row.tokens_per_second:.0f}" for row in rows if row.label == PLAIN), "")
        for label, ratio in panel.items():
            equal, total = equal_texts(measurements, label)
            differing += total - equal
            table.add_row(label, *(f"{value:.2f} x" for value in ratio.values()), f"{equal} of {total}")
        console.print(table)
        panels[title] = panel
        results[title] = {"ratio": panel, "rows": [vars(row) for row in rows]}
    results["costs"] = costs
    plot_ratios(out / "adaptive.png", panels, costs, thick=ADAPTIVE)
    console.print(f"written: {out / 'adaptive.png'}")
    return differing


def mixed_arrivals(count: int, rate: float, seed: int) -> list[Arrival]:
    """Requests at random times, `rate` per second on average: half greedy, half at temperature 1, lengths log-uniform.

    A prompt is the end of several held-out texts in a row. At rate infinity all come at once.
    """
    prompts, chance = held_out(32), random.Random(0)
    clock, spacing = 0.0, random.Random(seed)
    arrivals = []
    for number in range(count):
        first = number % len(prompts)
        tokens = [token for prompt in (*prompts[first:], *prompts[:first]) for token in prompt]
        length = round(SHORTEST * (LONGEST / SHORTEST) ** chance.random())
        answer = chance.randint(MOST_TOKENS // 4, MOST_TOKENS)
        arrivals.append(Arrival(clock, tokens[-length:], answer, float(number % 2), number))
        clock += spacing.expovariate(1.0) / rate
    return arrivals


def _mixed(servers: Sequence[Server], arguments: argparse.Namespace, results: dict[str, Any], console: Console) -> int:
    """Plain and adaptive in turn, with the same requests at the same times; returns how many answers differ."""
    plain, adaptive = (next(server for server in servers if server.label == label) for label in (PLAIN, ADAPTIVE))
    every = {key: list[dict[str, float]]() for key in itertools.product((AT_ONCE, ARRIVING), (PLAIN, ADAPTIVE))}
    equal, total, rate = 0, 0, math.inf
    with Progress(console=console) as progress:
        task = progress.add_task("mixed load", total=2 + 4 * arguments.rounds)
        for turn in range(arguments.rounds + 1):
            for kind in (AT_ONCE, ARRIVING) if turn else (AT_ONCE,):  # the first turn only warms up
                arrivals = mixed_arrivals(arguments.requests, math.inf if kind == AT_ONCE else rate, turn)
                texts = []
                for server in (plain, adaptive) if turn % 2 else (adaptive, plain):
                    answers, seconds = answer_arrivals(server, arrivals)
                    progress.advance(task)
                    texts.append([answer.text for answer in answers])
                    if turn:
                        every[kind, server.label].append(stream_times(answers, seconds))
                    elif server is plain:
                        rate = UTILISATION * len(arrivals) / seconds
                equal += sum(text == other for text, other in zip(*texts, strict=True))
                total += len(arrivals)
    medians = {
        key: {name: statistics.median(r[name] for r in rounds) for name in rounds[0]} for key, rounds in every.items()
    }
    table = Table(title=f"mixed load, medians of the rounds; arriving: {rate:.2f} requests/s; times in ms")
    for name in ("requests", "server", *next(iter(medians.values()))):
        table.add_column(name, justify="left" if name in ("requests", "server") else "right")
    for key, values in medians.items():
        table.add_row(*key, *(f"{value:.1f}" for value in values.values()), end_section=key[1] == ADAPTIVE)
    console.print(table)
    console.print(f"answers of the mixed load with the text of plain: {equal} of {total}")
    results["mixed"] = {"requests_per_second": rate, **{", ".join(key): value for key, value in medians.items()}}
    return total - equal


def _trees(arguments: argparse.Namespace, results: dict[str, Any], console: Console) -> int:
    """Tokens per forward of fixed trees, one request at a time; returns how many answers differ from plain's."""
    table = Table("tree (steps, topk, nodes)", title="tokens per forward, one request at a time")
    for temperature in TREE_TEMPERATURES:
        table.add_column(f"T = {temperature:g}", justify="right")
    with Progress(console=console) as progress:
        task = progress.add_task("trees", total=1 + len(TREES))
        plain, _ = _answers_alone(demo_engine("NONE"), arguments)
        progress.advance(task)
        equal, total, forwards = 0, 0, {}
        for label, flags in TREES.items():
            answers, per_forward = _answers_alone(demo_engine("EAGLE3", *flags), arguments)
            progress.advance(task)
            equal += sum(text == other for text, other in zip(answers, plain, strict=True))
            total += len(answers)
            table.add_row(label, *(f"{value:.2f}" for value in per_forward.values()))
            forwards[label] = per_forward
    console.print(table)
    console.print(f"answers of these trees that are plain's: {equal} of {total}")
    results["tokens_per_forward"] = forwards
    return total - equal


def _answers_alone(engine: Engine, arguments: argparse.Namespace) -> tuple[list[list[int]], dict[float, float]]:
    """All prompts at all temperatures, one request at a time: the answers, and tokens per forward by temperature."""
    answers, per_forward = [], {}
    for temperature in TREE_TEMPERATURES:
        tally = Tally()
        for seed, prompt in enumerate(held_out(arguments.prompts)):
            name = f"{temperature}-{seed}"
            answers.append(
                measure_alone(engine, name, prompt, arguments.max_tokens, tally, temperature=temperature, seed=seed)
            )
        per_forward[temperature] = tally.tokens_per_forward
    return answers, per_forward


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
