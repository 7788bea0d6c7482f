"""The output of a benchmark: a table, a JSON file and a picture."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_tools.bench.figures import save, subplots
from eagle_tools.bench.load import Measurement, TimedAnswer
from eagle_tools.bench.rich_output import Console, Table

SPECULATIVE, PLAIN = "speculative", "plain"


@dataclass(frozen=True)
class Row:
    """The medians over the rounds of one server at one concurrency."""

    label: str
    concurrency: int
    tokens_per_second: float
    first_token_ms: float
    mean_acceptance_length: float
    cycle_ms: float
    stage_ms: dict[str, float]


def rows_of(measurements: Sequence[Measurement]) -> list[Row]:
    """One row per (concurrency, server), medians over rounds."""
    rows = []
    for key in dict.fromkeys((m.concurrency, m.label) for m in measurements):
        same = [m for m in measurements if (m.concurrency, m.label) == key]
        stages = {
            name: statistics.median(1e3 * m.stage_seconds.get(name, 0.0) / max(1, m.cycles) for m in same)
            for name in same[0].stage_seconds
        }
        rows.append(
            Row(
                label=key[1],
                concurrency=key[0],
                tokens_per_second=statistics.median(m.tokens_per_second for m in same),
                first_token_ms=1e3 * statistics.median(m.first_token_median for m in same),
                mean_acceptance_length=statistics.median(m.mean_acceptance_length for m in same),
                cycle_ms=1e3 * statistics.median(m.seconds / max(1, m.cycles) for m in same),
                stage_ms=stages,
            )
        )
    return rows


def ratios(measurements: Sequence[Measurement], label: str = SPECULATIVE) -> dict[int, float]:
    """A server's tokens/s over plain's, by concurrency: the median of the ratios of the rounds."""
    out = {}
    for concurrency in dict.fromkeys(m.concurrency for m in measurements):
        pair = [
            [m.tokens_per_second for m in measurements if m.label == server and m.concurrency == concurrency]
            for server in (label, PLAIN)
        ]
        out[concurrency] = statistics.median(fast / slow for fast, slow in zip(*pair, strict=True))
    return out


def equal_texts(measurements: Sequence[Measurement], label: str = SPECULATIVE) -> tuple[int, int]:
    """How many of a server's answers have the text of plain, and how many there are."""
    texts, plain = ([t for m in measurements if m.label == server for t in m.texts] for server in (label, PLAIN))
    return sum(a == b for a, b in zip(texts, plain, strict=True)), len(texts)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by nearest rank."""
    return sorted(values)[round(share * (len(values) - 1))]


def stream_times(answers: Sequence[TimedAnswer], seconds: float) -> dict[str, float]:
    """Tokens per second over `seconds`, and percentiles in ms over all answers.

    TTFT: time to the first token; token gap: per token after the first event; event gap: between two events.
    """
    waits = {
        "TTFT": [answer.first_token for answer in answers],
        "token gap": [gap for answer in answers for gap in answer.token_gaps],
        "event gap": [gap for answer in answers for gap in answer.gaps],
    }
    times = {
        f"{name} p{share}": 1e3 * percentile(values, share / 100)
        for name, values in waits.items()
        for share in (50, 99)
    }
    return {"tokens/s": sum(answer.tokens for answer in answers) / seconds, **times}


def print_table(rows: Sequence[Row], ratio: dict[int, float], console: Console) -> None:
    """Print the results, and the time of each stage of a cycle."""
    table = Table(title="speculative against plain decoding, medians")
    for name in ("clients", "decoding", "tokens/s", "ratio", "acceptance length", "first token", "cycle"):
        table.add_column(name, justify="left" if name == "decoding" else "right")
    for row in rows:
        speculative = row.label == SPECULATIVE
        table.add_row(
            str(row.concurrency),
            row.label,
            f"{row.tokens_per_second:.1f}",
            f"{ratio[row.concurrency]:.2f} x" if speculative else "",
            f"{row.mean_acceptance_length:.2f}" if speculative else "",
            f"{row.first_token_ms:.0f} ms",
            f"{row.cycle_ms:.2f} ms",
        )
    console.print(table)
    stages = Table(title="engine time per cycle, ms")
    names = list(dict.fromkeys(name for row in rows for name in row.stage_ms))
    for name in ("clients", "decoding", *names):
        stages.add_column(name, justify="left" if name == "decoding" else "right")
    for row in rows:
        stages.add_row(str(row.concurrency), row.label, *(f"{row.stage_ms.get(name, 0.0):.2f}" for name in names))
    console.print(stages)


def write_json(path: Path, settings: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the machine, the settings and the results."""
    document = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        **results,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def plot(path: Path, rows: Sequence[Row], ratio: dict[int, float]) -> None:
    """Left: tokens/s by concurrency. Right: the time of each stage of a cycle."""
    figure, (left, right) = subplots(1, 2, figsize=(10, 4))
    levels = list(ratio)
    for offset, label in ((-0.2, PLAIN), (0.2, SPECULATIVE)):
        heights = [r.tokens_per_second for r in rows if r.label == label]
        bars = left.bar([i + offset for i in range(len(levels))], heights, 0.38, label=label)
        marks = [
            f"{h:.0f}" if label == PLAIN else f"{h:.0f}\n{ratio[c]:.2f}x" for h, c in zip(heights, levels, strict=True)
        ]
        left.bar_label(bars, marks)
    left.set_xticks(range(len(levels)), [f"{c} client{'s' if c > 1 else ''}" for c in levels])
    left.set_ylabel("tokens/s")
    left.margins(y=0.2)
    left.legend()
    bottoms = [0.0] * len(rows)
    for stage in dict.fromkeys(name for row in rows for name in row.stage_ms):
        widths = [row.stage_ms.get(stage, 0.0) for row in rows]
        right.barh(range(len(rows)), widths, left=bottoms, label=stage)
        bottoms = [b + w for b, w in zip(bottoms, widths, strict=True)]
    right.set_yticks(range(len(rows)), [f"{r.label}, {r.concurrency}" for r in rows])
    right.set_xlabel("engine time per cycle, ms")
    right.legend(fontsize=8)
    save(figure, path)


def plot_ratios(
    path: Path, panels: Mapping[str, Mapping[str, Mapping[int, float]]], costs: Mapping[str, Any], thick: str
) -> None:
    """Tokens/s over plain's, by clients: a panel per title, a line per server. Plain is the line at 1.

    The last panel has the server's cost model, `costs` of /v1/server_info.
    """
    count = len(panels) + 1
    figure, axes = subplots(1, count, figsize=(4.6 * count, 4), squeeze=False)
    highest = 1.1 * max(max(ratio.values()) for servers in panels.values() for ratio in servers.values())
    for axis, (title, servers) in zip(axes[0], panels.items(), strict=False):
        axis.axhline(1.0, color="black", linewidth=1, label=PLAIN)
        for label, ratio in servers.items():
            style = {"linewidth": 3.2, "color": "#0b7f5c", "zorder": 3} if label == thick else {"linewidth": 1.2}
            axis.plot(list(ratio), list(ratio.values()), marker="o", markersize=4, label=label, **style)
        levels = list(dict.fromkeys(clients for ratio in servers.values() for clients in ratio))
        axis.set_xscale("log", base=2)
        axis.set_xticks(levels, [str(clients) for clients in levels])
        axis.minorticks_off()
        axis.set_xlabel("clients")
        axis.set_title(title)
        axis.set_ylim(0, max(highest, 1.1))
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("tokens/s, plain decoding = 1")
    axes[0][-2].legend(fontsize=8)
    _plot_costs(axes[0][-1], costs)
    save(figure, path)


def _plot_costs(axis: Any, costs: Mapping[str, Any]) -> None:
    """Milliseconds of a cycle's stages by rows."""
    for stage, label in (("verify", "verify"), ("draft_extend", "draft-extend"), ("draft_step", "draft step")):
        curve = costs[stage]
        axis.plot(curve["rows"], [costs["speed"] * ms for ms in curve["ms"]], marker="o", markersize=3, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("rows")
    axis.set_ylabel("ms")
    axis.set_title("measured costs")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
