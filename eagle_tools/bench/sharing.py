"""python -m eagle_tools.bench.sharing: the gain of n-grams if requests also draft from other requests' texts.

The demo's held-out prompts are sent several times, each time with another seed, one request at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from eagle_tools.bench.demo import Tally, demo_engine, held_out, measure
from eagle_tools.bench.rich_output import Console, Table


def main(argv: Sequence[str]) -> int:
    """Run the comparison; returns 0, or 1 if sharing changed an answer."""
    parser = argparse.ArgumentParser(prog="python -m eagle_tools.bench.sharing", description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="how many of the demo's 32 held-out prompts (16)")
    parser.add_argument("--rounds", type=int, default=4, help="how often each is sent (4)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per answer (96)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of all requests (0.7)")
    parser.add_argument("--nodes", type=int, default=8, help="nodes verified at once (8)")
    arguments = parser.parse_args(argv)
    prompts, nodes = held_out(arguments.prompts), ["--speculative-num-draft-tokens", str(arguments.nodes)]
    trees = {"NGRAM": nodes, "EAGLE3+NGRAM": ["--speculative-num-steps", "5", "--topk", "4", *nodes]}
    table = Table(title=f"tokens per forward at temperature {arguments.temperature}")
    columns = ["drafter", "shared", *(f"round {number + 1}" for number in range(arguments.rounds)), "tokens/s"]
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    departures = 0
    for name, tree in trees.items():
        answers = []
        for shared in ([], ["--speculative-ngram-share"]):
            engine = demo_engine(name, *tree, *shared)
            rounds = [Tally() for _ in range(arguments.rounds)]
            answers.append(
                [
                    measure(
                        engine,
                        f"{seed}-{number}",
                        prompt,
                        arguments.max_tokens,
                        tally,
                        temperature=arguments.temperature,
                        seed=seed,
                    )
                    for seed, tally in enumerate(rounds)
                    for number, prompt in enumerate(prompts)
                ]
            )
            speed = sum(tally.tokens for tally in rounds) / sum(tally.seconds for tally in rounds)
            lengths = [f"{tally.tokens_per_forward:.2f}" for tally in rounds]
            table.add_row(name, "yes" if shared else "no", *lengths, f"{speed:.0f}", end_section=bool(shared))
        departures += sum(text != other for text, other in zip(*answers, strict=True))
    Console(width=96).print(table)
    print(f"answers that sharing changed: {departures} of {2 * arguments.rounds * len(prompts)}")
    return int(departures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
