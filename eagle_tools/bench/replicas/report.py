"""The tables and the picture of the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_tools.bench.figures import save, subplots
from eagle_tools.bench.replicas.costs import ReplicaCosts
from eagle_tools.bench.replicas.routing import POLICIES
from eagle_tools.bench.rich_output import Console, Table

Summary = Mapping[str, float]
TIMES = ("TTFT p50", "TTFT p99", "latency p50", "latency p99")
COLOURS = dict(zip(POLICIES, ("#8a8a8a", "#b5651d", "#9467bd", "#0b7f5c", "#1f6fb2"), strict=True))


@dataclass(frozen=True)
class Point:
    """One policy at one number of replicas."""

    replicas: int
    policy: str
    summary: Summary


def print_points(points: Sequence[Point], title: str, console: Console) -> None:
    table = Table(title=title)
    for name in ("replicas", "routing", "hit rate", *TIMES, "tokens/s", "per replica", "tokens/cycle"):
        table.add_column(name, justify="left" if name == "routing" else "right", no_wrap=True)
    for number, point in enumerate(points):
        last = number + 1 == len(points) or points[number + 1].replicas != point.replicas
        table.add_row(
            str(point.replicas),
            point.policy,
            *_cells(point.summary)[:-2],
            f"{point.summary['tokens/s']:.0f}",
            f"{point.summary['tokens/s'] / point.replicas:.0f}",
            f"{point.summary['tokens/cycle']:.2f}",
            end_section=last,
        )
    console.print(table)


def print_replay(measured: Summary, simulated: Summary, console: Console) -> None:
    table = Table(title="the same turns on the server and in the simulation")
    for name in ("", "turns", "hit rate", *TIMES, "tokens/s", "tokens/cycle"):
        table.add_column(name, justify="right")
    for label, summary in (("measured", measured), ("simulated", simulated)):
        table.add_row(label, f"{summary['turns']:.0f}", *_cells(summary))
    ratios = [f"{simulated[name] / measured[name]:.2f} x" for name in ("hit rate", *TIMES, "tokens/s", "tokens/cycle")]
    table.add_row("ratio", "", *ratios)
    console.print(table)


def _cells(summary: Summary) -> list[str]:
    times = [f"{1e3 * summary[name]:.1f} ms" for name in TIMES]
    return [f"{summary['hit rate']:.1%}", *times, f"{summary['tokens/s']:.0f}", f"{summary['tokens/cycle']:.2f}"]


def print_costs(costs: ReplicaCosts, console: Console) -> None:
    table = Table(title=f"costs of {costs.model}: {1e6 * costs.prefill_token:.1f} us per prompt token")
    for name in ("requests that decode", "cycle", "tokens per request and cycle", "tokens/s"):
        table.add_column(name, justify="right")
    for batch, seconds, tokens in zip(costs.batches, costs.cycle_seconds, costs.cycle_tokens, strict=True):
        table.add_row(str(batch), f"{1e3 * seconds:.2f} ms", f"{tokens:.2f}", f"{batch * tokens / seconds:.0f}")
    console.print(table)


def plot_points(path: Path, points: Sequence[Point], costs: ReplicaCosts) -> None:
    """Hit rate, times and throughput by replicas, a line per policy; and the costs behind them. p99 is dashed."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = subplots(2, 3, figsize=(13.5, 7.5))
    hits, first, whole, speed, gain, measured = axes.flat
    for policy in dict.fromkeys(point.policy for point in points):
        drawn = [point for point in points if point.policy == policy]
        replicas = [point.replicas for point in drawn]
        style = {"color": COLOURS[policy], "linewidth": 1.5, "markersize": 4}

        def draw(axis: Any, values: list[float], line: str = "o-", style: Any = style, at: Any = replicas) -> Any:
            return axis.plot(at, values, line, **style)[0]

        draw(hits, [100 * point.summary["hit rate"] for point in drawn]).set_label(policy)
        for axis, name in ((first, "TTFT"), (whole, "latency")):
            draw(axis, [1e3 * point.summary[f"{name} p50"] for point in drawn])
            draw(axis, [1e3 * point.summary[f"{name} p99"] for point in drawn], "o--")
        draw(speed, [point.summary["tokens/s"] / point.replicas for point in drawn])
        draw(gain, [point.summary["tokens/cycle"] for point in drawn])
    titles = {
        hits: "prompt tokens found in a prefix cache, %",
        first: "time to first token, ms (p99 dashed)",
        whole: "time to the last token, ms (p99 dashed)",
        speed: "tokens/s per replica",
        gain: "tokens per request and cycle",
    }
    replicas = sorted({point.replicas for point in points})
    for axis, title in titles.items():
        axis.set(title=title, xscale="log", xlabel="replicas")
        axis.set_xticks(replicas, [str(count) for count in replicas])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in (first, whole):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    for axis in (hits, speed, gain):
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    hits.legend(fontsize=8)
    _plot_costs(measured, costs)
    save(figure, path)


def _plot_costs(axis: Any, costs: ReplicaCosts) -> None:
    """A cycle's milliseconds by batch, and on the right scale the tokens it gives each request."""
    seconds = [1e3 * cycle for cycle in costs.cycle_seconds]
    (cycle,) = axis.plot(costs.batches, seconds, "o-", color="black", markersize=4, label="cycle, ms")
    axis.set(title=f"measured costs: {costs.model}", xscale="log", xlabel="requests that decode", ylabel="ms")
    axis.set_xticks(costs.batches, [str(batch) for batch in costs.batches])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    right = axis.twinx()
    (tokens,) = right.plot(
        costs.batches, costs.cycle_tokens, "s-", color="#0b7f5c", markersize=4, label="tokens per request"
    )
    right.set_ylim(bottom=0)
    axis.legend(handles=[cycle, tokens], fontsize=8, loc="lower right")
