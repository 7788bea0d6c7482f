"""Load on one server: clients that wait for each answer before they ask again, or requests at given times."""

from __future__ import annotations

import http.client
import json
import math
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from eagle_tools.bench.servers import BenchError, ServerAddress


@dataclass(frozen=True)
class TimedAnswer:
    """One streamed completion. `first_token` is seconds after the request was sent, NaN if no tokens came.

    `seconds` is the time until its end. `cached_tokens` of the `prompt_tokens` were in the prefix cache. `gaps` are the
    seconds between one event with tokens and the next, which brings `gap_tokens` tokens.
    """

    tokens: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    first_token: float
    text: str
    speculative: dict[str, Any] | None
    gaps: tuple[float, ...]
    gap_tokens: tuple[int, ...]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds per token after the first event: a gap before n tokens counts n times, with 1/n of its seconds."""
        return [gap / count for gap, count in zip(self.gaps, self.gap_tokens, strict=True) for _ in range(count)]


@dataclass(frozen=True)
class Measurement:
    """One pass over the prompts at one concurrency. `stage_seconds` and `cycles` are counted by the engine.

    stage_seconds: of all cycles, as if they were like those that the engine measured.
    """

    label: str
    concurrency: int
    seconds: float
    tokens: int
    first_token_median: float
    mean_acceptance_length: float
    cycles: int
    stage_seconds: dict[str, float]
    texts: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Workload:
    """The requests, the same for every server. A prompt is a text or token ids; `seed` is the first request's.

    `model`: its name, which some routers need. `fields`: further ones of every body.
    """

    prompts: tuple[str | list[int], ...]
    max_tokens: int
    temperature: float
    seed: int = 0
    model: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrival:
    """One request of an open load. `seconds` is the time after the start at which it is sent."""

    seconds: float
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int


def read_texts(path: Path) -> list[str]:
    """The prompts in a JSON list of strings.

    Raises:
        BenchError: it is no such list.
    """
    texts: Any = json.loads(path.read_text())
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise BenchError(f"{path}: a JSON list of strings is expected")
    return texts


def measure(server: ServerAddress, workload: Workload, concurrency: int) -> Measurement:
    """Send every prompt once, with `concurrency` clients."""
    before = server.stats()
    waiting: SimpleQueue[tuple[int, str | list[int]]] = SimpleQueue()
    for item in enumerate(workload.prompts):
        waiting.put(item)
    answers: dict[int, TimedAnswer] = {}
    errors: list[Exception] = []

    def client() -> None:
        while not errors:
            try:
                index, prompt = waiting.get_nowait()
            except Empty:
                return
            try:
                answers[index] = ask(server, prompt, replace(workload, seed=workload.seed + index))
            except (OSError, ValueError, BenchError) as error:
                errors.append(error)

    start = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise BenchError(f"{server.label}: {errors[0]}")
    return _summary(server, concurrency, seconds, [answers[i] for i in sorted(answers)], before)


def answer_arrivals(server: ServerAddress, arrivals: Sequence[Arrival]) -> tuple[list[TimedAnswer], float]:
    """Send every request at its time, whether or not earlier ones are answered; returns also the seconds of all."""
    start = time.perf_counter()

    def client(arrival: Arrival) -> TimedAnswer:
        time.sleep(max(0.0, start + arrival.seconds - time.perf_counter()))
        workload = Workload((), arrival.max_tokens, arrival.temperature, arrival.seed)
        return ask(server, arrival.prompt, workload)

    with ThreadPoolExecutor(len(arrivals)) as clients:
        try:
            answers = list(clients.map(client, arrivals))
        except (OSError, ValueError) as error:
            raise BenchError(f"{server.label}: {error}") from error
    return answers, time.perf_counter() - start


class Leaving(Exception):
    """The client closed the connection before its answer was complete."""


def ask(
    server: ServerAddress,
    prompt: str | list[int],
    workload: Workload,
    leave_after: int | None = None,
    timeout: float = 600,
) -> TimedAnswer:
    """One streamed completion that runs to max_tokens.

    Raises:
        Leaving: `leave_after` events came, so the connection was closed.
        TimeoutError: nothing came for `timeout` seconds.
        BenchError: an answer or event that is an error.
    """
    body = {
        **({} if workload.model is None else {"model": workload.model}),
        "prompt": prompt,
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "seed": workload.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # to count each event's tokens; routers drop vLLM's continuous_usage_stats
        **workload.fields,
    }
    connection = server.connect(timeout)
    try:
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), server.headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise BenchError(f"status {response.status}: {response.read(300).decode(errors='replace')}")
        return _read_stream(response, start, leave_after)
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse, start: float, leave_after: int | None) -> TimedAnswer:
    times, counts, pieces, speculative, events = list[float](), [0], list[str](), None, 0
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        events += 1
        if events == leave_after:
            raise Leaving
        event = json.loads(line[6:])
        if "error" in event:
            raise BenchError(str(event["error"]))
        pieces.extend(choice["text"] for choice in event["choices"])
        tokens = sum(len(choice["token_ids"]) for choice in event["choices"])
        if tokens:
            times.append(time.perf_counter() - start)
            counts.append(counts[-1] + tokens)
        usage = event["usage"] or usage
        speculative = (event.get("metrics") or {}).get("speculative_decoding")
    if not usage:
        raise BenchError("a stream ended early")
    return TimedAnswer(
        tokens=counts[-1],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        seconds=time.perf_counter() - start,
        first_token=times[0] if times else math.nan,
        text="".join(pieces),
        speculative=speculative,
        gaps=tuple(later - earlier for earlier, later in pairwise(times)),
        gap_tokens=tuple(later - earlier for earlier, later in pairwise(counts[1:])),
    )


def _summary(
    server: ServerAddress, concurrency: int, seconds: float, answers: Sequence[TimedAnswer], before: dict[str, Any]
) -> Measurement:
    after = server.stats()
    cycles, measured = (after[name] - before[name] for name in ("cycles", "measured_cycles"))
    share = measured / max(1, cycles)
    added = {name: total - before["stage_seconds"].get(name, 0.0) for name, total in after["stage_seconds"].items()}
    steps = sum(a.speculative["num_spec_steps"] for a in answers if a.speculative)
    accepted = sum(a.speculative["num_accepted_draft_tokens"] for a in answers if a.speculative)
    return Measurement(
        label=server.label,
        concurrency=concurrency,
        seconds=seconds,
        tokens=sum(a.tokens for a in answers),
        first_token_median=statistics.median(
            [a.first_token for a in answers if not math.isnan(a.first_token)] or [0.0]
        ),
        mean_acceptance_length=1 + accepted / steps if steps else 1.0,
        cycles=cycles,
        stage_seconds={name: seconds / share for name, seconds in added.items()} if share else {},
        texts=tuple(a.text for a in answers),
    )
