"""python -m eagle_tools.bench.quantization: the demo in each format of its weights: quality, memory and speed.

The text that is scored is float32's own: answers to held-out prompts, sampled at temperature 1. So the logarithm of a
perplexity's ratio to float32's is the divergence of the two models. Every answer with speculation is compared with
plain decoding in the same format.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle_server.engine.engine import Engine
from eagle_server.models.layers import Linear
from eagle_server.request import Request, SamplingParams
from eagle_tools.bench.demo import Tally, demo_engine, held_out, measure
from eagle_tools.bench.report import write_json
from eagle_tools.bench.rich_output import Console, Progress, Table

FORMATS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}


@dataclass
class FormatRow:
    """One format. megabytes: of the target's linear layers. same: answers equal to plain decoding's."""

    name: str
    megabytes: float
    perplexity: float
    plain: float  # tokens/s
    speculative: float
    tokens_per_forward: float
    same: int


def perplexity(engine: Engine, sequences: Sequence[Sequence[int]], begins: Sequence[int]) -> float:
    """The perplexity of the texts' tokens from `begins` on."""
    total, count = 0.0, 0
    for number, (tokens, begin) in enumerate(zip(sequences, begins, strict=True)):
        one = SamplingParams(max_tokens=1, seed=0)
        name = f"score {number}"
        engine.add(Request(request_id=name, prompt_token_ids=list(tokens), sampling=one, prompt_logprobs=True))
        while engine.has_work():
            for delta in engine.step():
                for token in (delta.prompt_logprobs or [])[begin - 1 :]:
                    total -= token.logprob
                    count += 1
    return math.exp(total / count)


def megabytes(engine: Engine) -> float:
    """The size of the target's linear layers."""
    target = engine.worker.verifier.target
    linears = (module for module in target.modules() if isinstance(module, Linear))  # type: ignore[attr-defined]
    return sum(linear.nbytes for linear in linears) / 1e6


def answers(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, tally: Tally) -> list[list[int]]:
    return [measure(engine, f"answer {i}", prompt, tokens, tally) for i, prompt in enumerate(prompts)]


def sampled(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The prompts with answers of temperature 1."""
    tally = Tally()
    return [
        [*prompt, *measure(engine, f"sample {i}", prompt, tokens, tally, temperature=1.0, seed=i)]
        for i, prompt in enumerate(prompts)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.quantization",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--formats", nargs="+", choices=tuple(FORMATS), default=tuple(FORMATS), help="all of them")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts (32)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per answer (96)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (2)")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the numbers")
    arguments = parser.parse_args(argv)
    prompts, rows = held_out(arguments.prompts), list[FormatRow]()
    begins = [len(prompt) for prompt in prompts]
    sequences = sampled(
        demo_engine("NONE", *FORMATS["float32"], threads=arguments.threads), prompts, arguments.max_tokens
    )
    with Progress(console=Console(stderr=True)) as progress:
        for name in progress.track(arguments.formats, description="formats"):
            plain_tally, tally = Tally(), Tally()
            plain = demo_engine("NONE", *FORMATS[name], threads=arguments.threads)
            score = perplexity(plain, sequences, begins)
            expected = answers(plain, prompts, arguments.max_tokens, plain_tally)
            fast = demo_engine("EAGLE3", *FORMATS[name], threads=arguments.threads)
            with_drafts = answers(fast, prompts, arguments.max_tokens, tally)
            same = sum(a == b for a, b in zip(expected, with_drafts, strict=True))
            speeds = plain_tally.tokens / plain_tally.seconds, tally.tokens / tally.seconds
            rows.append(FormatRow(name, megabytes(plain), score, *speeds, tally.tokens_per_forward, same))
    Console().print(_table(rows, len(prompts)))
    if arguments.out is not None:
        write_json(arguments.out, vars(arguments), {"rows": [asdict(row) for row in rows]})
    return 0 if all(row.same == len(prompts) for row in rows) else 1


def _table(rows: Sequence[FormatRow], count: int) -> Table:
    table = Table("format", title="the demo by the format of its weights, one request at a time")
    for heading in (
        "linear layers, MB",
        "perplexity",
        "plain tokens/s",
        "speculative",
        "tokens per forward",
        "same text",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.megabytes:.1f}",
            f"{row.perplexity:.3f}",
            f"{row.plain:.0f}",
            f"{row.speculative:.0f} ({row.speculative / row.plain:.2f} x)",
            f"{row.tokens_per_forward:.2f}",
            f"{row.same} of {count}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
