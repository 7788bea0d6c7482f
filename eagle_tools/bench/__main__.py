"""`eagle-server bench`: speculative and plain decoding side by side."""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_server.config.commands import without_drafting
from eagle_tools import DEMO
from eagle_tools.bench.load import Measurement, Workload, measure, read_texts
from eagle_tools.bench.report import PLAIN, SPECULATIVE, equal_texts, plot, print_table, ratios, rows_of, write_json
from eagle_tools.bench.rich_output import Console, Progress
from eagle_tools.bench.servers import BenchError, running

TABLE_WIDTH = 96  # the tables need it, also if the output is not a terminal
HOPS = "hops"
DEMO_PROMPTS = DEMO / "prompts.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle-server bench",
        description="Starts two servers, one that speculates and one with --speculative-algorithm NONE, sends the same "
        "prompts to both alternately, and compares tokens/s. Both get the server flags after `--`; the plain one "
        "without those of drafting.",
        epilog=f"`eagle-server bench {HOPS}` counts the files, functions and objects that a cycle and an answer go "
        "through. Example of a benchmark: eagle-server bench --concurrency 1 8 -- --speculative-num-steps 3 --topk 4",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], metavar="N", help="clients (1 8)")
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS, help="JSON list of strings (the demo's held-out)")
    parser.add_argument(
        "--max-tokens", type=int, nargs="+", default=[96], metavar="N", help="tokens per answer, one table each (96)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per server and concurrency, alternating (3)")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON and PNG")
    parser.add_argument("server_flags", nargs="*", help="after --: flags for both servers")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns 0, or 2 with one line on stderr."""
    if argv and argv[0] == HOPS:
        from eagle_tools.bench import hops  # imported here because it loads an engine, and a benchmark needs none

        return hops.main(argv[1:])
    arguments = _parser().parse_args(argv)
    console = Console(width=max(TABLE_WIDTH, shutil.get_terminal_size().columns))
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    try:
        for max_tokens, measurements in _run(arguments, tuple(read_texts(arguments.prompts)), console).items():
            rows, ratio = rows_of(measurements), ratios(measurements)
            console.print(f"\n{max_tokens} tokens per answer")
            print_table(rows, ratio, console)
            equal, total = equal_texts(measurements)
            console.print(f"answers with the same text from both servers: {equal} of {total}")
            results[f"{max_tokens} tokens"] = {"ratio": ratio, "rows": [vars(row) for row in rows]}
            plot(arguments.out / f"bench-{max_tokens}.png", rows, ratio)
    except (BenchError, OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    write_json(arguments.out / "bench.json", vars(arguments), results)
    console.print(f"written: {arguments.out}/bench.json and a picture for each table")
    return 0


def _run(arguments: argparse.Namespace, prompts: tuple[str, ...], console: Console) -> dict[int, list[Measurement]]:
    """The measurements by tokens per answer."""
    # Without this, the later of two equal rounds would find its prompts in the prefix cache.
    flags = ["--disable-radix-cache", *arguments.server_flags]
    measurements: dict[int, list[Measurement]] = {count: [] for count in arguments.max_tokens}
    with (
        running(SPECULATIVE, flags) as fast,
        running(PLAIN, [*without_drafting(flags), "--speculative-algorithm", "NONE"]) as slow,
        Progress(console=console) as progress,
    ):
        loads = list(itertools.product(measurements, arguments.concurrency))
        task = progress.add_task("measuring", total=len(loads) * 2 * (arguments.rounds + 1))
        for max_tokens, concurrency in loads:
            workload = Workload(prompts, max_tokens, arguments.temperature)
            for turn in range(arguments.rounds + 1):
                for server in (fast, slow) if turn % 2 else (slow, fast):
                    result = measure(server, workload, concurrency)
                    progress.advance(task)
                    if turn > 0:  # the first round only warms up
                        measurements[max_tokens].append(result)
    return measurements


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
