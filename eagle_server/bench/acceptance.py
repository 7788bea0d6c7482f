"""python -m eagle_server.bench.acceptance: lossless against typical acceptance, the lossy one, on the demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from eagle_server.bench.demo import Demo, Tally, held_out, measure
from eagle_server.speculation.accept import Acceptance, Lossless
from eagle_server.speculation.typical import Typical


def main(argv: Sequence[str]) -> int:
    """Run the comparison; 0, or 1 if a greedy answer was not the lossless one."""
    parser = argparse.ArgumentParser(prog="python -m eagle_server.bench.acceptance", description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="of the demo's 32 held-out prompts (16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per answer (96)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="(0 0.7 1)")
    parser.add_argument("--steps", type=int, default=3, help="of the head's tree (3)")
    parser.add_argument("--topk", type=int, default=4, help="of the head's tree (4)")
    parser.add_argument("--nodes", type=int, default=13, help="verified at once (13)")
    parser.add_argument("--posterior-threshold", type=float, default=0.09, help="of typical acceptance (0.09)")
    parser.add_argument("--posterior-alpha", type=float, default=0.3, help="of typical acceptance (0.3)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    demo, prompts = Demo.load(arguments.steps, arguments.topk, arguments.nodes), held_out(arguments.prompts)
    rules: dict[str, Acceptance] = {
        "lossless": Lossless(),
        "typical (lossy)": Typical(arguments.posterior_threshold, arguments.posterior_alpha),
    }
    table = Table(title="EAGLE3, one request at a time")
    for column in ("temperature", "acceptance", "tokens per forward", "tokens/s"):
        table.add_column(column, justify="left" if column == "acceptance" else "right")
    departures = 0
    for temperature in arguments.temperatures:
        texts = []
        for name, rule in rules.items():
            engine, tally = demo.engine(model=True, ngrams=False, acceptance=rule), Tally()
            texts.append(
                [
                    measure(engine, str(i), prompt, arguments.max_tokens, tally, temperature=temperature, seed=i)
                    for i, prompt in enumerate(prompts)
                ]
            )
            speed = f"{tally.tokens / tally.seconds:.0f}"
            table.add_row(f"{temperature:g}", name, f"{tally.tokens_per_forward:.2f}", speed)
        departures += (texts[0] != texts[1]) if temperature == 0 else 0
    Console(width=96).print(table)
    return departures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
