"""The measured costs of one server, which is one replica of the simulation: a JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from eagle_tools.bench.servers import BenchError

DEMO_COSTS = Path(__file__).parent / "demo-costs.json"


@dataclass(frozen=True)
class ReplicaCosts:
    """What a cycle takes, and the server's limits. Linear between and beyond the measured batches.

    prefill_cycle: seconds that a cycle takes longer because it computes prompts; prefill_token: per prompt token.
    batches: numbers of requests that decode; cycle_seconds: of one cycle; cycle_tokens: of one request in a cycle.
    kv_token_seconds: what one token of context adds to a cycle.
    """

    model: str
    prefill_cycle: float
    prefill_token: float
    batches: tuple[int, ...]
    cycle_seconds: tuple[float, ...]
    cycle_tokens: tuple[float, ...]
    kv_token_seconds: float
    kv_tokens: int
    max_running_requests: int
    chunked_prefill_size: int
    context_length: int

    def __post_init__(self) -> None:
        if not len(self.batches) == len(self.cycle_seconds) == len(self.cycle_tokens) > 0:
            raise ValueError("batches, cycle_seconds and cycle_tokens must have the same number of entries")
        if list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError("batches must increase from 1 or more")
        if min(self.cycle_seconds) <= 0 or min(self.cycle_tokens) < 1:
            raise ValueError("a cycle takes time and gives every request at least one token")
        if min(self.prefill_cycle, self.prefill_token, self.kv_token_seconds) < 0:
            raise ValueError("costs are not negative")
        if min(self.kv_tokens, self.max_running_requests, self.chunked_prefill_size, self.context_length) < 1:
            raise ValueError("limits are at least 1")

    @cached_property
    def seconds_by_batch(self) -> list[float]:
        """Seconds of a cycle without contexts, by the number of requests that decode. None decode: 0."""
        return [0.0, *_line(self.batches, self.cycle_seconds, self.max_running_requests)]

    @cached_property
    def tokens_by_batch(self) -> list[float]:
        """Tokens per cycle and request, by the number of requests that decode."""
        line = _line(self.batches, self.cycle_tokens, self.max_running_requests)
        return [0.0, *(max(1.0, tokens) for tokens in line)]

    def turns_per_second(self, prompt: float, answer: float) -> float:
        """Turns that a replica answers at its largest batch if it computes every prompt whole."""
        batch = self.max_running_requests
        cycle = self.seconds_by_batch[batch] + self.kv_token_seconds * batch * (prompt + answer / 2)
        chunks = prompt / self.chunked_prefill_size
        prefill = prompt * self.prefill_token + chunks * self.prefill_cycle
        return 1 / (prefill + answer * cycle / (batch * self.tokens_by_batch[batch]))


def _line(sizes: tuple[int, ...], values: tuple[float, ...], largest: int) -> list[float]:
    """Values at 1..largest: linear between the sizes, and beyond the last one with the slope before it."""
    wanted = np.arange(1, largest + 1)
    line = np.interp(wanted, sizes, values)
    if len(sizes) > 1:
        slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        line += np.maximum(wanted - sizes[-1], 0) * slope
    return [float(value) for value in line]


def read_costs(path: Path) -> ReplicaCosts:
    """Read a file that `--measure` wrote.

    Raises:
        BenchError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        return msgspec.convert(json.loads(path.read_text())["costs"], ReplicaCosts, strict=False)
    except (ValueError, KeyError, TypeError) as error:  # msgspec's errors are ValueErrors
        raise BenchError(f"{path}: this is no file of measured costs: {error}") from error
