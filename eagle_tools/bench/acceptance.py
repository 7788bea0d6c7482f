"""python -m eagle_tools.bench.acceptance: lossless against typical (lossy) acceptance, on the demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from eagle_tools.bench.demo import Tally, demo_engine, held_out, measure
from eagle_tools.bench.rich_output import Console, Table

TREE = ("--speculative-num-steps", "3", "--topk", "4")


def main(argv: Sequence[str]) -> int:
    """Run the comparison; returns 0, or 1 if a greedy answer differs from the lossless one."""
    parser = argparse.ArgumentParser(prog="python -m eagle_tools.bench.acceptance", description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="how many of the demo's 32 held-out prompts (16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per answer (96)")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="of the requests (0 0.7 1)"
    )
    parser.add_argument("--posterior-threshold", type=float, default=0.09, help="of typical acceptance (0.09)")
    parser.add_argument("--posterior-alpha", type=float, default=0.3, help="of typical acceptance (0.3)")
    arguments = parser.parse_args(argv)
    threshold, alpha = str(arguments.posterior_threshold), str(arguments.posterior_alpha)
    limits = ["--typical-posterior-threshold", threshold, "--typical-posterior-alpha", alpha]
    rules = {"lossless": [], "typical (lossy)": ["--acceptance", "typical", *limits]}
    prompts, departures = held_out(arguments.prompts), 0
    table = Table(title="EAGLE3, 3 steps, topk 4, 13 nodes, one request at a time")
    for column in ("temperature", "acceptance", "tokens per forward", "tokens/s"):
        table.add_column(column, justify="left" if column == "acceptance" else "right")
    for temperature in arguments.temperatures:
        texts = []
        for name, flags in rules.items():
            engine, tally = demo_engine("EAGLE3", *TREE, *flags), Tally()
            texts.append(
                [
                    measure(engine, str(i), prompt, arguments.max_tokens, tally, temperature=temperature, seed=i)
                    for i, prompt in enumerate(prompts)
                ]
            )
            speed = f"{tally.tokens / tally.seconds:.0f}"
            table.add_row(f"{temperature:g}", name, f"{tally.tokens_per_forward:.2f}", speed)
        departures += temperature == 0 and texts[0] != texts[1]
    Console(width=96).print(table)
    return int(departures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
