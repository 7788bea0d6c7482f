"""python -m eagle_tools.bench.linears: one matrix by the native kernels in every format, beside the memory's read rate.

Copies of a matrix take turns, so that none stays in a cache. Formats, and a loop that only reads memory, are timed in
turn; numbers are medians. `of memory's` is the rate at which the packed weight is read, against that loop's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_server.ops.linear.blocks import FORMATS, BlockRows, BlockWeight
from eagle_server.ops.linear.quantize import Quantization, quantize
from eagle_server.ops.native.library import set_threads
from eagle_server.ops.native.linear import NativeWeight, native_linear
from eagle_tools.bench.report import write_json
from eagle_tools.bench.rich_output import Console, Table
from eagle_tools.bench.shapes import PAUSE, READ, read_rate

ROUNDED: tuple[Quantization, ...] = ("int8", "int4")
EVERY = ("bfloat16", *ROUNDED, *FORMATS)
TOGETHER = 400_000_000  # bytes of a matrix's copies


@dataclass
class LinearRow:
    """The median seconds of one product with a matrix of `bytes`, and how fast it read those."""

    matrix: str
    format: str
    rows: int
    seconds: float
    bytes: int
    of_memory: float


def packed(form: str, outputs: int, inputs: int) -> NativeWeight:
    """A matrix with random numbers, of blocks with finite scales."""
    if form in FORMATS:
        block = FORMATS[form]
        data = torch.randint(64, (outputs, inputs // block.inputs * block.bytes), dtype=torch.uint8)
        return NativeWeight(BlockWeight((BlockRows(form, data),)))
    weight = torch.randn(outputs, inputs) / inputs**0.5
    return NativeWeight(weight.bfloat16() if form == "bfloat16" else quantize(weight, _rounded(form)))


def _copies(first: NativeWeight) -> list[NativeWeight]:
    found = [first]
    for _ in range(TOGETHER // first.nbytes):
        found.append(copy(first))
        found[-1].data = first.data.clone()
    return found


def _rounded(form: str) -> Quantization:
    return next(each for each in ROUNDED if each == form)


def measured(outputs: int, inputs: int, formats: Sequence[str], rows: Sequence[int], rounds: int) -> list[LinearRow]:
    """One row for each format and number of rows. The first round only warms up."""
    copies = {form: _copies(packed(form, outputs, inputs)) for form in formats}
    memory, rates = torch.ones(READ, dtype=torch.int64), list[float]()
    seconds = {(form, count): list[float]() for form in formats for count in rows}
    for _ in range(rounds + 1):
        for (form, count), times in seconds.items():
            x = torch.randn(count, inputs)
            began = time.perf_counter()
            for weight in copies[form]:
                native_linear(x, weight, None)
            times.append((time.perf_counter() - began) / len(copies[form]))
            time.sleep(PAUSE)
        rates.append(read_rate(memory))
        time.sleep(PAUSE)
    rate, found = statistics.median(rates[1:]), []
    for (form, count), times in seconds.items():
        median, size = statistics.median(times[1:]), copies[form][0].nbytes
        found.append(LinearRow(f"{outputs} x {inputs}", form, count, median, size, size / median / rate))
    return found


def table(found: Sequence[LinearRow]) -> Table:
    """All rows of one matrix."""
    alone = {row.format: row.seconds for row in found if row.rows == found[0].rows}
    result = Table("", "rows", "ms", f"of {found[0].rows} rows", "bits", "GB/s", "of memory's", title=found[0].matrix)
    outputs, inputs = (int(size) for size in found[0].matrix.split(" x "))
    for row in found:
        times = f"{1e3 * row.seconds:.2f}", f"{row.seconds / alone[row.format]:.2f} x"
        rate = f"{row.bytes / row.seconds / 1e9:.1f}", f"{row.of_memory:.2f}"
        result.add_row(row.format, str(row.rows), *times, f"{8 * row.bytes / outputs / inputs:.2f}", *rate)
    return result


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.linears",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="+", default=["4096x4096", "4096x14336"], help="outputs x inputs")
    parser.add_argument("--formats", nargs="+", choices=EVERY, default=EVERY, help="of the weights (all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="rows of a product (1 8)")
    parser.add_argument("--rounds", type=int, default=7, help="over all formats (7)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (2)")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the numbers")
    arguments = parser.parse_args(argv)
    set_threads(arguments.threads, fused=False)
    every = []
    for size in arguments.sizes:
        outputs, inputs = (int(part) for part in size.split("x"))
        found = measured(outputs, inputs, arguments.formats, arguments.rows, arguments.rounds)
        Console().print(table(found))
        every += found
    if arguments.out is not None:
        write_json(arguments.out, vars(arguments), {"rows": [vars(row) for row in every]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
