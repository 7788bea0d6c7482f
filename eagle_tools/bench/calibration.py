"""python -m eagle_tools.bench.calibration: estimated against observed acceptance of drafted tokens, on the demo."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle_server.engine.engine import Engine
from eagle_server.request import DraftTree, Request, SamplingParams
from eagle_tools.bench.demo import demo_engine, held_out
from eagle_tools.bench.figures import save, subplots
from eagle_tools.bench.report import write_json
from eagle_tools.bench.rich_output import Console, Table, track

BINS = 10  # of equal width
LEAST = 20  # nodes of a bin that is drawn


@dataclass
class Reliability:
    """Nodes of one depth, by bins of their estimated chances: how many, the sum of the estimates, how many accepted."""

    counts: list[int] = field(default_factory=lambda: [0] * BINS)
    estimated: list[float] = field(default_factory=lambda: [0.0] * BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, estimate: float, *, accepted: bool) -> None:
        place = min(int(estimate * BINS), BINS - 1)
        self.counts[place] += 1
        self.estimated[place] += estimate
        self.accepted[place] += accepted

    @property
    def error(self) -> float:
        """The mean over the nodes of |mean estimate - share accepted| of their bins (expected calibration error)."""
        gaps = (abs(a - b) for a, b in zip(self.estimated, self.accepted, strict=True))
        return sum(gaps) / sum(self.counts)

    @property
    def noise(self) -> float:
        """The error that perfect estimates would have on average, because so few nodes are counted."""
        rows = zip(self.counts, self.estimated, strict=True)
        deviations = (math.sqrt(estimated * (1 - estimated / count)) for count, estimated in rows if count)
        return math.sqrt(2 / math.pi) * sum(deviations) / sum(self.counts)

    def points(self) -> list[tuple[float, float]]:
        """(mean estimate, share accepted) of each bin with enough nodes."""
        rows = zip(self.counts, self.estimated, self.accepted, strict=True)
        return [(estimated / count, accepted / count) for count, estimated, accepted in rows if count >= LEAST]


def estimates(tree: DraftTree) -> Iterator[tuple[int, float, bool]]:
    """(depth, estimated chance given an accepted parent, whether accepted) of the nodes with an accepted parent.

    Nothing for a plain step. Nothing for a tree in which the request ended: it is unknown what the target would accept.

    Raises:
        ValueError: the drafter estimates nothing.
    """
    if tree.bonus is None or len(tree.parents) == 1:
        return
    if tree.scores is None:
        raise ValueError("this drafter gives no estimates")
    walked, depths = {0, *tree.path}, [0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        depths.append(depths[parent] + 1)
        if parent in walked:
            chance = math.exp(min(0.0, tree.scores[node] - tree.scores[parent]))
            yield depths[node], chance, node in walked


def observe(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float) -> list[Reliability]:
    """Answer the prompts, as many at a time as the engine runs; returns the reliability of each depth, from 1.

    Repeated prompts have different seeds.
    """
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        name = f"{temperature}-{seed}"
        engine.add(Request(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, trees=True))
    depths: list[Reliability] = []
    while engine.has_work():
        for tree in (delta.tree for delta in engine.step() if delta.tree is not None):
            for depth, chance, accepted in estimates(tree):
                depths.extend(Reliability() for _ in range(depth - len(depths)))
                depths[depth - 1].add(chance, accepted=accepted)
    return depths


def mean_error(depths: Sequence[Reliability]) -> float:
    """The errors of all depths, weighted by their nodes."""
    weights = [sum(depth.counts) for depth in depths]
    return sum(depth.error * weight for depth, weight in zip(depths, weights, strict=True)) / max(1, sum(weights))


def print_errors(curves: Mapping[float, Sequence[Reliability]], console: Console) -> None:
    table = Table(title="mean |estimated - observed acceptance| by depth (of perfect estimates; nodes)")
    deepest = max(map(len, curves.values()))
    for column in ("temperature", "all", *map(str, range(1, deepest + 1))):
        table.add_column(column, justify="right")
    for temperature, depths in curves.items():
        cells = [f"{depth.error:.3f} ({depth.noise:.3f}; {sum(depth.counts)})" for depth in depths]
        table.add_row(f"{temperature:g}", f"{mean_error(depths):.3f}", *cells, *[""] * (deepest - len(cells)))
    console.print(table)


def plot(path: Path, curves: Mapping[float, Sequence[Reliability]]) -> None:
    """A panel per temperature: a line per depth over the estimates, and below it the number of nodes per estimate."""
    from matplotlib import colormaps

    figure, axes = subplots(
        2, len(curves), figsize=(4 * len(curves), 5), sharex=True, squeeze=False, height_ratios=(3, 1)
    )
    for (above, below), (temperature, depths) in zip(axes.T, curves.items(), strict=True):
        above.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
        below_bars = [0.0] * BINS
        for depth, reliability in enumerate(depths, start=1):
            color = colormaps["viridis"]((depth - 1) / max(1, len(depths) - 1) * 0.9)
            points = reliability.points()
            above.plot([x for x, _ in points], [y for _, y in points], "o-", markersize=4, color=color, label=depth)
            centers = [(place + 0.5) / BINS for place in range(BINS)]
            below.bar(centers, reliability.counts, 0.9 / BINS, bottom=below_bars, color=color)
            below_bars = [low + count for low, count in zip(below_bars, reliability.counts, strict=True)]
        above.set_title(f"temperature {temperature:g}, mean error {mean_error(depths):.3f}", fontsize=10)
        below.set_xlabel("estimated acceptance")
    axes[0][0].set_ylabel("observed acceptance")
    axes[1][0].set_ylabel("nodes")
    axes[0][-1].legend(title="depth", fontsize=8, title_fontsize=8)
    save(figure, path)


def main(argv: Sequence[str]) -> int:
    """Measure, print and draw; returns 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m eagle_tools.bench.calibration", description=__doc__)
    parser.add_argument("--prompts", type=int, default=32, help="how many of the demo's 32 held-out prompts (32)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per answer (96)")
    parser.add_argument("--answers", type=int, default=4, help="per prompt, above temperature 0 (4)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="(0 0.7 1)")
    parser.add_argument("--running", type=int, default=1, help="requests at a time (1)")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON and PNG")
    parser.add_argument("engine_flags", nargs="*", help="after --: flags of the engine")
    arguments = parser.parse_args(argv)
    engine = demo_engine("EAGLE3", *arguments.engine_flags, running=arguments.running)
    console, prompts = Console(width=110), held_out(arguments.prompts)
    try:
        curves = {
            temperature: observe(
                engine, prompts * (arguments.answers if temperature else 1), arguments.max_tokens, temperature
            )
            for temperature in track(arguments.temperatures, "answering", console=console)
        }
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print_errors(curves, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {
        f"temperature {t:g}": [vars(depth) | {"error": depth.error, "noise": depth.noise} for depth in d]
        for t, d in curves.items()
    }
    write_json(arguments.out / "calibration.json", vars(arguments), results)
    plot(arguments.out / "calibration.png", curves)
    console.print(f"written: {arguments.out / 'calibration.json'}, {arguments.out / 'calibration.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
