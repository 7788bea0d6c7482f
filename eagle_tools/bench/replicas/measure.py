"""Measures the costs of a running server: what a prompt token takes, and what a cycle takes and gives by batch."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np

from eagle_tools.bench.load import TimedAnswer, Workload, ask
from eagle_tools.bench.replicas.costs import ReplicaCosts
from eagle_tools.bench.servers import BenchError, ServerAddress

PROMPT_POINTS, PROMPT_REPEATS = 5, 3
SHORT_PROMPT = 64  # tokens
LONG_SHARE = 0.7  # of the context, filled by long prompts
ANSWER_TOKENS = 64  # longer ones of a small model repeat themselves, which is easy to draft
ROUNDS = 3
LEAST_ANSWERS = 8  # in a round: small batches are repeated
ATTENTION_SHARE = 0.8  # the most of a cycle that counts as attention; a bound on noise


def measure_costs(
    server: ServerAddress, texts: Sequence[str], batches: Sequence[int], advance: Callable[[], None] = lambda: None
) -> ReplicaCosts:
    """Measure a server that has nothing else to do. `advance` is called `steps(batches)` times.

    Raises:
        BenchError: an answer is an error, or too short to measure.
        OSError: the server cannot be reached.
    """
    info = server.get("/v1/server_info")
    limits, serving = info["resolved"], info["serving"]
    most = limits["scheduler"]["max_running_requests"]
    batches = sorted({min(batch, most) for batch in batches})
    tokens = [token for text in texts for token in server.post("/tokenize", {"prompt": text})["tokens"]]
    answer = min(ANSWER_TOKENS, serving["context_length"] // 4)
    long = int((serving["context_length"] - answer) * LONG_SHARE)
    waits: dict[int, list[float]] = {}
    points = [(batch, length) for batch in batches for length in (min(SHORT_PROMPT, long), long)]
    means: dict[tuple[int, int], list[tuple[float, float]]] = {point: [] for point in points}
    for turn in range(ROUNDS):  # everything in each round, so that other load on the machine slows all alike
        for prompt in _prompts(serving):
            waits.setdefault(len(prompt), []).append(ask(server, prompt, Workload((), 1, 0.0)).first_token)
        advance()
        for batch, length in points:
            gaps = _decode_often(server, tokens, batch, length, answer, turn)
            means[batch, length].append((statistics.mean(s for s, _ in gaps), statistics.mean(t for _, t in gaps)))
            advance()
    cycles = {
        point: (statistics.median(s for s, _ in gaps), statistics.mean(t for _, t in gaps))
        for point, gaps in means.items()
    }
    prefill_cycle, prefill_token = _prefill(waits)
    per_token = _attention(cycles, answer)
    alone = {
        batch: statistics.mean(
            seconds - per_token * batch * (length + answer / 2)
            for (b, length), (seconds, _) in cycles.items()
            if b == batch
        )
        for batch in batches
    }
    gains = {b: statistics.mean(gain for (batch, _), (_, gain) in cycles.items() if batch == b) for b in batches}
    return ReplicaCosts(
        model=str(info["served_model_name"]),
        prefill_cycle=_rounded(prefill_cycle),
        prefill_token=_rounded(prefill_token),
        batches=tuple(batches),
        cycle_seconds=tuple(_rounded(alone[b]) for b in batches),
        cycle_tokens=tuple(_rounded(max(1.0, gains[b])) for b in batches),
        kv_token_seconds=_rounded(per_token),
        kv_tokens=info["engine"]["kv_slots_total"],
        max_running_requests=most,
        chunked_prefill_size=limits["scheduler"]["chunked_prefill_size"],
        context_length=serving["context_length"],
    )


def steps(batches: Sequence[int]) -> int:
    """How often `measure_costs` calls `advance`."""
    return ROUNDS * (1 + 2 * len(set(batches)))


def _prompts(serving: dict[str, Any]) -> list[list[int]]:
    """Prompts of several lengths that no prefix cache has."""
    chance, longest = random.Random(time.time_ns()), serving["context_length"] - 2
    lengths = [round(16 * (longest / 16) ** (i / (PROMPT_POINTS - 1))) for i in range(PROMPT_POINTS)]
    return [[chance.randrange(serving["vocab_size"]) for _ in range(n)] for n in lengths * PROMPT_REPEATS]


def _prefill(waits: dict[int, list[float]]) -> tuple[float, float]:
    """Seconds until the first token: a constant, and per prompt token. `waits`: by tokens of the prompt."""
    seconds = [statistics.median(waited) for waited in waits.values()]
    # relative errors count: a line through the longest prompts alone says little about short ones
    slope, intercept = np.polyfit(list(waits), seconds, 1, w=1 / np.array(seconds))
    return max(float(intercept), 0.0), max(float(slope), 0.0)


def _decode_often(
    server: ServerAddress, tokens: Sequence[int], batch: int, length: int, answer: int, turn: int
) -> list[tuple[float, int]]:
    """`_decode` for at least LEAST_ANSWERS requests, with other prompts than in the other turns."""
    repeats = max(1, LEAST_ANSWERS // batch)
    count, first = repeats * batch, turn * repeats * batch
    pieces = [_piece(tokens, first + number, ROUNDS * count, length) for number in range(count)]
    gaps = [gap for i in range(repeats) for gap in _decode(server, pieces[i * batch : (i + 1) * batch], answer)]
    if not gaps:
        raise BenchError(f"{server.label}: {batch} requests never decode together; measure smaller --batches")
    return gaps


def _piece(tokens: Sequence[int], number: int, count: int, length: int) -> list[int]:
    """The prompt with this number, of `count` that begin at different places."""
    first = number * len(tokens) // count
    return ([*tokens[first:], *tokens[:first]] * (1 + length // len(tokens)))[:length]


def _decode(server: ServerAddress, prompts: Sequence[list[int]], answer: int) -> list[tuple[float, int]]:
    """Seconds of each cycle of each request, and the request's tokens in it, while all of them decode."""

    def client(prompt: list[int], tokens: int = answer) -> tuple[float, TimedAnswer]:
        return time.perf_counter(), ask(server, prompt, Workload((), tokens, 0.0))

    with ThreadPoolExecutor(len(prompts)) as clients:
        list(clients.map(lambda prompt: client(prompt, 1), prompts))  # so that they are in the prefix cache
        answers = list(clients.map(client, prompts))
    times = [list(accumulate(a.gaps, initial=begin + a.first_token)) for begin, a in answers]
    begin, end = max(starts[0] for starts in times), min(starts[-1] for starts in times)
    return [
        (gap, count)
        for starts, (_, timed) in zip(times, answers, strict=True)
        for at, gap, count in zip(starts, timed.gaps, timed.gap_tokens, strict=False)
        if begin <= at and at + gap <= end
    ]


def _attention(cycles: dict[tuple[int, int], tuple[float, float]], answer: int) -> float:
    """Seconds per token of context in a cycle: the median over the batches, at least 0."""
    short, long = sorted({length for _, length in cycles})
    batches = sorted({batch for batch, _ in cycles})
    slopes = [(cycles[b, long][0] - cycles[b, short][0]) / (b * (long - short)) for b in batches]
    bound = min(ATTENTION_SHARE * seconds / (b * (length + answer / 2)) for (b, length), (seconds, _) in cycles.items())
    return min(max(0.0, statistics.median(slopes)), bound)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
