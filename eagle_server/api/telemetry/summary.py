"""Logs a line about the engine every few seconds while it has work."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from eagle_server.request import CycleStats, EngineStats

logger = logging.getLogger(__name__)


@dataclass
class Window:
    """Counts since `began` (seconds of time.monotonic())."""

    began: float
    prompt: int = 0
    output: int = 0
    drafts: int = 0
    accepted: int = 0
    queries: int = 0
    hits: int = 0

    def add(self, cycle: CycleStats, generated: int) -> None:
        self.prompt += cycle.prompt_tokens
        self.output += generated
        self.queries += cycle.cache_queries
        self.hits += cycle.cache_hits
        for drafted, accepted in cycle.verified:
            self.drafts += drafted > 0
            self.accepted += accepted


@dataclass
class Summary:
    """Logs at most every `interval` seconds; 0 disables it. Windows exclude idle time: rates are those under load."""

    interval: float
    _window: Window | None = field(default=None, init=False)

    def cycle(self, cycle: CycleStats, generated: int, stats: EngineStats, now: float) -> None:
        """A cycle ended at `now` (seconds of time.monotonic()). `stats` is the engine's state after it."""
        if not self.interval:
            return
        if self._window is None:
            self._window = Window(now - cycle.seconds)
        self._window.add(cycle, generated)
        if now - self._window.began >= self.interval:
            _log(self._window, stats, now - self._window.began)
            self._window = Window(now)
        if not (stats.running or stats.waiting):
            self._window = None


def _log(window: Window, stats: EngineStats, seconds: float) -> None:
    fields: dict[str, float] = {
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_cache_usage": round(kv_cache_usage(stats), 4),
        "prompt_tokens_per_second": round(window.prompt / seconds, 1),
        "output_tokens_per_second": round(window.output / seconds, 1),
    }
    line = "running %d, waiting %d, KV cache %.1f %%, prompts %.1f tokens/s, output %.1f tokens/s"
    values = [
        stats.running,
        stats.waiting,
        100 * kv_cache_usage(stats),
        window.prompt / seconds,
        window.output / seconds,
    ]
    if window.drafts:
        fields["accept_length"] = round(1 + window.accepted / window.drafts, 3)
        line += ", accept length %.2f"
        values.append(1 + window.accepted / window.drafts)
    if window.queries:
        fields["prefix_cache_hit_rate"] = round(window.hits / window.queries, 4)
        line += ", prefix cache hits %.1f %%"
        values.append(100 * window.hits / window.queries)
    logger.info(line, *values, extra={"fields": fields})


def kv_cache_usage(stats: EngineStats) -> float:
    """Share of the KV slots that requests hold. Slots that only the prefix cache holds count as free."""
    return 1 - stats.kv_slots_free / stats.kv_slots_total if stats.kv_slots_total else 0.0
