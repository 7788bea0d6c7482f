"""python -m eagle_tools.bench.calibration: estimated against observed acceptance of drafted tokens, on the demo."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle_server.engine.engine import Engine
from eagle_server.request import DraftTree, Request, SamplingParams
from eagle_tools.bench.demo import demo_engine, held_out
from eagle_tools.bench.report import write_json

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

    Nothing for a tree whose request ended inside it: what would have been accepted is unknown.

    Raises:
        ValueError: the drafter estimates nothing.
    """
    if tree.scores is None:
        raise ValueError("this drafter gives no estimates")
    if tree.bonus is None:
        return
    walked, depths = {0, *tree.path}, [0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        depths.append(depths[parent] + 1)
        if parent in walked:
            chance = math.exp(min(0.0, tree.scores[node] - tree.scores[parent]))
            yield depths[node], chance, node in walked


def observe(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float) -> list[Reliability]:
    """Answer the prompts, as many at a time as the engine runs; the reliability of each depth, from 1.

    A prompt that occurs several times has other answers each time.
    """
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        name = f"{temperature}-{seed}"
        engine.add(Request(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, trees=True))
    found: list[Reliability] = []
    while engine.has_work():
        for tree in (delta.tree for delta in engine.step() if delta.tree is not None):
            for depth, chance, accepted in estimates(tree):
                found.extend(Reliability() for _ in range(depth - len(found)))
                found[depth - 1].add(chance, accepted=accepted)
    return found


def mean_error(depths: Sequence[Reliability]) -> float:
    """The errors of all depths, weighted by their nodes."""
    weights = [sum(each.counts) for each in depths]
    return sum(each.error * weight for each, weight in zip(depths, weights, strict=True)) / max(1, sum(weights))


def print_errors(found: Mapping[float, Sequence[Reliability]], console: Console) -> None:
    table = Table(title="mean |estimated - observed acceptance| by depth (of perfect estimates; nodes)")
    deepest = max(map(len, found.values()))
    for column in ("temperature", "all", *map(str, range(1, deepest + 1))):
        table.add_column(column, justify="right")
    for temperature, depths in found.items():
        cells = [f"{each.error:.3f} ({each.noise:.3f}; {sum(each.counts)})" for each in depths]
        table.add_row(f"{temperature:g}", f"{mean_error(depths):.3f}", *cells, *[""] * (deepest - len(cells)))
    console.print(table)


def plot(path: Path, found: Mapping[float, Sequence[Reliability]]) -> None:
    """A panel per temperature: a line per depth over the estimates, and below it how many nodes were estimated so."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(found), figsize=(4 * len(found), 5), dpi=100, sharex=True, squeeze=False, height_ratios=(3, 1)
    )
    for (above, below), (temperature, depths) in zip(axes.T, found.items(), strict=True):
        above.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
        below_bars = [0.0] * BINS
        for depth, each in enumerate(depths, start=1):
            color = plt.get_cmap("viridis")((depth - 1) / max(1, len(depths) - 1) * 0.9)
            points = each.points()
            above.plot([x for x, _ in points], [y for _, y in points], "o-", markersize=4, color=color, label=depth)
            centers = [(place + 0.5) / BINS for place in range(BINS)]
            below.bar(centers, each.counts, 0.9 / BINS, bottom=below_bars, color=color)
            below_bars = [low + count for low, count in zip(below_bars, each.counts, strict=True)]
        above.set_title(f"temperature {temperature:g}, mean error {mean_error(depths):.3f}", fontsize=10)
        below.set_xlabel("estimated acceptance")
    axes[0][0].set_ylabel("observed acceptance")
    axes[1][0].set_ylabel("nodes")
    axes[0][-1].legend(title="depth", fontsize=8, title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


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
        found = {
            temperature: observe(
                engine, prompts * (arguments.answers if temperature else 1), arguments.max_tokens, temperature
            )
            for temperature in track(arguments.temperatures, "answering", console=console)
        }
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print_errors(found, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {
        f"temperature {t:g}": [vars(depth) | {"error": depth.error, "noise": depth.noise} for depth in d]
        for t, d in found.items()
    }
    write_json(arguments.out / "calibration.json", vars(arguments), results)
    plot(arguments.out / "calibration.png", found)
    console.print(f"written: {arguments.out / 'calibration.json'}, {arguments.out / 'calibration.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
