"""python -m eagle_tools.bench.scale: one server against several workers behind a router, on one machine.

Clients hold conversations: each turn repeats the ones before it, and conversations of a group begin with the same
text, as with a system prompt. All servers share this machine's cores, so on a CPU more workers are not expected to be
faster: N workers with a share of the cores do the work of one. What can be seen is what the router costs (one server
with and without it), how evenly it spreads requests, and how much of the prompts it finds in prefix caches. The gain of
more hardware needs more hardware. Setups are measured in turn; on a busy machine only large differences mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from eagle_tools import DEMO
from eagle_tools.bench.figures import save, subplots
from eagle_tools.bench.load import TimedAnswer, Workload, ask
from eagle_tools.bench.report import percentile, write_json
from eagle_tools.bench.rich_output import Console, Progress, Table
from eagle_tools.bench.routers import MODULES, require, routing
from eagle_tools.bench.servers import BenchError, Server, running

PROMPTS = DEMO / "prompts.json"
NEXT_TURN = "\n\n\ndef step_{}("  # what the user says after each answer
ONE = "1 server"


@dataclass(frozen=True)
class Setup:
    """What clients connect to, and the workers behind it; without a router it is the only worker."""

    server: Server
    workers: Sequence[Server]


@dataclass(frozen=True)
class Pass:
    """All conversations once, in one setup. `seconds` is the whole time; `shares` of the tokens by worker."""

    seconds: float
    answers: tuple[TimedAnswer, ...]
    shares: tuple[float, ...]

    @property
    def numbers(self) -> dict[str, float]:
        """Throughput, latencies in ms, and the share of the prompts' tokens that were cached."""
        waits = {"latency": [a.seconds for a in self.answers], "TTFT": [a.first_token for a in self.answers]}
        cached, prompt = (sum(getattr(a, name) for a in self.answers) for name in ("cached_tokens", "prompt_tokens"))
        return {
            "tokens/s": sum(a.tokens for a in self.answers) / self.seconds,
            **{f"{name} p{p}": 1e3 * percentile(values, p / 100) for name, values in waits.items() for p in (50, 99)},
            "cached": cached / prompt,
            "busiest worker": max(self.shares),
        }


def openings(count: int, groups: int, turn: int) -> list[str]:
    """The first text of each conversation: its group's text, then its own. No text of another turn is repeated."""
    texts: list[str] = json.loads(PROMPTS.read_text())
    shared = [f"# group {turn}.{group}\n{texts[group % len(texts)]}" for group in range(groups)]
    return [f"{shared[number % groups]}\ndef task_{number}(" for number in range(count)]


def converse(setup: Setup, turn: int, arguments: argparse.Namespace) -> Pass:
    """Hold all conversations, as many at a time as there are clients. Nothing is cached before.

    Raises:
        BenchError: a request failed.
    """
    server, workers = setup.server, setup.workers
    requests = Workload((), arguments.max_tokens, 0.0, model=workers[0].get("/v1/models")["data"][0]["id"])
    for worker in workers:
        worker.flush_cache()

    def conversation(text: str) -> list[TimedAnswer]:
        answers = []
        for number in range(arguments.turns):
            answers.append(ask(server, text, requests))
            text += answers[-1].text + NEXT_TURN.format(number)
        return answers

    before = [worker.stats()["generated_tokens"] for worker in workers]
    start = time.perf_counter()
    with ThreadPoolExecutor(arguments.clients) as clients:
        try:
            begun = openings(arguments.conversations, arguments.groups, turn)
            answers = [answer for answers in clients.map(conversation, begun) for answer in answers]
        except (OSError, ValueError) as error:
            raise BenchError(f"{server.label}: {error}") from error
    seconds = time.perf_counter() - start
    tokens = [worker.stats()["generated_tokens"] - count for worker, count in zip(workers, before, strict=True)]
    return Pass(seconds, tuple(answers), tuple(count / max(1, sum(tokens)) for count in tokens))


def launch(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Setup]:
    """All setups. Routers and policies are measured in turn, so they share the workers."""
    cores, setups = len(os.sched_getaffinity(0)), dict[str, Setup]()
    for size in dict.fromkeys((1, *arguments.workers)):
        flags = ["--cpu-threads", str(max(1, cores // size)), *arguments.server_flags]
        workers = [stack.enter_context(running(f"worker {number}", flags)) for number in range(size)]
        if size == 1:
            setups[ONE] = Setup(workers[0], workers)
        for router, policy in product(arguments.routers, arguments.policies) if size in arguments.workers else ():
            label = f"{size} behind {router}" + (f", {policy}" if len(arguments.policies) > 1 else "")
            setups[label] = Setup(stack.enter_context(routing(router, workers, ["--policy", policy])), workers)
    return setups


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, list[Pass]]:
    """The passes of every setup, in turn. The first of each only warms up.

    Raises:
        BenchError: a router is not installed, or a server or request failed.
    """
    for router in arguments.routers:
        require(router)
    with ExitStack() as stack:
        setups = launch(arguments, stack)
        passes: dict[str, list[Pass]] = {label: [] for label in setups}
        with Progress(console=console) as progress:
            task = progress.add_task("measuring", total=len(setups) * (arguments.rounds + 1))
            for turn in range(arguments.rounds + 1):
                for label, setup in setups.items() if turn % 2 else reversed(setups.items()):
                    passes[label].append(converse(setup, turn, arguments))
                    progress.advance(task)
    return {label: rounds[1:] for label, rounds in passes.items()}


def report(passes: dict[str, list[Pass]], console: Console) -> tuple[dict[str, dict[str, float]], int]:
    """Print the medians over the rounds; also return them, and how many answers differ from the one server's."""
    medians = {
        label: {name: statistics.median(measured.numbers[name] for measured in rounds) for name in rounds[0].numbers}
        for label, rounds in passes.items()
    }
    table = Table(title="conversations: medians of the rounds, times in ms")
    table.add_column("servers", no_wrap=True)
    for name in ("tokens/s", "ratio", *list(medians[ONE])[1:]):
        table.add_column(name, justify="right")
    for label, numbers in medians.items():
        speed, *times, cached, busiest = numbers.values()
        cells = (f"{speed:.0f}", f"{speed / medians[ONE]['tokens/s']:.2f} x", *(f"{value:.0f}" for value in times))
        table.add_row(label, *cells, f"{cached:.0%}", f"{busiest:.0%}")
    console.print(table)
    texts = {label: [a.text for measured in rounds for a in measured.answers] for label, rounds in passes.items()}
    pairs = [pair for answers in texts.values() for pair in zip(answers, texts[ONE], strict=True)]
    differing = sum(text != one for text, one in pairs)
    console.print(f"answers with the text of {ONE}: {len(pairs) - differing} of {len(pairs)}")
    return medians, differing


def plot(path: Path, medians: dict[str, dict[str, float]]) -> None:
    """Throughput, the 99th percentile of the latency, and the cached share of the prompts."""
    names = {"tokens/s": "tokens/s", "latency p99": "latency p99, ms", "cached": "cached share of prompts"}
    figure, axes = subplots(1, len(names), figsize=(12, 1.2 + 0.5 * len(medians)), sharey=True)
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        bars = axis.barh(list(medians), [values[name] for values in medians.values()], color="#0b7f5c")
        axis.bar_label(bars, fmt="%.2f" if name == "cached" else "%.0f", padding=3)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.18)
    axes[0].invert_yaxis()
    save(figure, path)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: should be a number, 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workers", type=_count, nargs="+", default=[1, 2], metavar="N", help="behind each router (1 2)"
    )
    parser.add_argument("--routers", nargs="+", choices=list(MODULES), default=list(MODULES), help="which (both)")
    parser.add_argument("--policies", nargs="+", default=["cache_aware"], help="of the routers (cache_aware)")
    parser.add_argument("--clients", type=_count, default=8, help="conversations at a time (8)")
    parser.add_argument("--conversations", type=_count, default=24, help="in a round (24)")
    parser.add_argument("--groups", type=_count, default=6, help="of conversations that begin with the same text (6)")
    parser.add_argument("--turns", type=_count, default=3, help="requests of a conversation (3)")
    parser.add_argument("--max-tokens", type=_count, default=32, help="tokens per answer (32)")
    parser.add_argument("--rounds", type=_count, default=2, help="measured rounds of each setup (2)")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON and PNG")
    parser.add_argument("server_flags", nargs="*", help="after --: flags of all servers")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run it; returns 0, 1 if an answer differs from the one server's, or 2 with one line on stderr."""
    arguments = _parser().parse_args(argv)
    console = Console(width=132)
    try:
        passes = measure(arguments, console)
    except (BenchError, OSError) as error:
        print(f"scale: {error}", file=sys.stderr)
        return 2
    medians, differing = report(passes, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "scale.json", vars(arguments), {"medians": medians, "differing": differing})
    plot(arguments.out / "scale.png", medians)
    console.print(f"written: {arguments.out / 'scale.json'}, {arguments.out / 'scale.png'}")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
