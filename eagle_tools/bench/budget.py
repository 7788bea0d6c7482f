"""python -m eagle_tools.bench.budget: the shape that the budget chooses, against the best one, over measured costs.

Nothing is served. Trees grow as the head's do, over contexts that are easy or hard; each node's estimate is its chance.
Cycles take what the cost curves say. The best shape is known from many trees: of all steps, topk and nodes with fixed
shapes, of all steps, topk and least chances without.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from eagle_server.plan import Decode, RequestSampling, TreeShape
from eagle_server.request import SamplingParams
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.budget.budget import AdaptiveBudget, CycleBudget
from eagle_server.worker.budget.cost_model import CostModel, draft_steps, extended_rows
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.budget.outcome import LessonOutcome, Outcome
from eagle_server.worker.budget.prospects import Floats, Ints, Prospects
from eagle_server.worker.graphs import bucket_sizes
from eagle_tools.bench.report import write_json
from eagle_tools.bench.rich_output import Console, Table, track

TREE = TreeConfig(6, 8, 64)
BATCHES = (1, 4, 8, 16, 32, 64)
CONTEXTS = (512, 8_192, 32_768)  # tokens of each request
TREES = 160  # of which the best shape is known
SETTLING, CYCLES = 192, 128
OTHER = 8  # fewer requests come after many, others after one
_EASY, _HARD = (0.93, 0.05), (0.47, 0.37)  # chances of the first child, and of all others together
_OTHERS = np.array([0.42, 0.20, 0.12, 0.09, 0.07, 0.05, 0.05])  # how the others share theirs


@dataclass(frozen=True)
class MachineCosts:
    """Milliseconds by rows, see `CostModel`. `fixed`: all trees of a cycle have one shape, as with CUDA graphs.

    per_kv: of verification per 1,024 KV tokens, with 1 node per request and with 64; linear in between. kv: tokens that
    the machine has memory for; 0: per_kv is not known, so texts are short.
    """

    verify: Mapping[int, float]
    extend: Mapping[int, float]
    step: Mapping[int, float]
    between: float
    fixed: bool = True
    per_kv: tuple[float, float] = (0.0, 0.0)
    kv: int = 0

    def costs(self) -> CostModel:
        """The curves, exact from the start."""
        plain, wide = self.per_kv
        model = CostModel(between=self.between / 1e3, kv_per_node=(wide / plain - 1) / 63 if plain else 0.0)
        model.verify.fit(_seconds(self.verify), self.per_kv[0] / 1024e3)
        model.extend.fit(_seconds(self.extend))
        model.step.fit(_seconds(self.step))
        return model


def _seconds(points: Mapping[int, float]) -> dict[int, float]:
    return {rows: ms / 1e3 for rows, ms in points.items()}


MACHINES = {
    # Measured with an 8B model in bf16, see docs/gpu.md. What a cycle with drafts costs the host is in `extend`.
    "H100": MachineCosts(
        {1: 6.55, 8: 7.1, 64: 7.9, 128: 8.7, 256: 10.3, 512: 13.7, 1024: 24, 2048: 44, 4096: 91},
        {7: 1.6, 224: 2.5, 448: 3.6},
        {1: 0.33, 8: 0.365, 64: 0.55, 256: 1.0, 512: 1.6},
        between=0.2,
        per_kv=(0.044, 0.097),
        kv=450_000,
    ),
    # Not measured: the H100's, where the weights' bytes decide 0.7 of it, where products do the same.
    "H200": MachineCosts(
        {1: 4.6, 8: 5.0, 64: 5.7, 128: 6.9, 256: 9.6, 512: 13.4, 1024: 23.8, 2048: 44, 4096: 91},
        {7: 1.5, 224: 2.3, 448: 3.4},
        {1: 0.24, 8: 0.26, 64: 0.42, 256: 0.92, 512: 1.55},
        between=0.2,
    ),
    # Measured with the demo on 2 cores.
    "CPU": MachineCosts(
        {1: 0.9, 2: 1.1, 4: 1.35, 8: 2.2, 16: 3.6, 32: 6.2, 64: 11.2, 128: 21},
        {1: 0.35, 8: 0.6, 64: 2.4},
        {1: 0.075, 4: 0.12, 8: 0.2, 32: 0.7, 64: 1.5},
        between=0.1,
        fixed=False,
    ),
}
HEADS = {"strong": (0.84, 0.74), "usual": (0.75, 0.60), "weak": (0.65, 0.50)}  # first child's chance by depth: 1, 6


def grown(chance: np.random.Generator, head: tuple[float, float], shape: TreeShape, count: int) -> tuple[Floats, Ints]:
    """Trees of `count` requests, best nodes first: log chances of paths, and parents [count, nodes - 1]."""
    steps, nodes, topk = shape
    paths, fed = np.zeros((count, 1)), np.zeros((count, 1), dtype=np.int64)
    pool, parents = list[Floats](), list[Ints]()
    made = 0
    for depth in range(steps):
        logp = (paths[:, :, None] + np.log(_children(chance, head, depth, paths.shape, topk))).reshape(count, -1)
        pool.append(logp)
        parents.append(np.repeat(fed, topk, axis=1))
        best = np.argsort(-logp, axis=1, kind="stable")[:, :topk]
        paths, fed = np.take_along_axis(logp, best, axis=1), best + made + 1
        made += logp.shape[1]
    logp, above = np.concatenate(pool, axis=1), np.concatenate(parents, axis=1)
    kept = np.argsort(-logp, axis=1, kind="stable")[:, : nodes - 1]
    place = np.zeros((count, made + 1), dtype=np.int64)
    np.put_along_axis(place, kept + 1, np.arange(1, kept.shape[1] + 1)[None], axis=1)
    above = np.take_along_axis(place, np.take_along_axis(above, kept, axis=1), axis=1)
    return np.take_along_axis(logp, kept, axis=1), above


def _children(
    chance: np.random.Generator, head: tuple[float, float], depth: int, shape: tuple[int, ...], topk: int
) -> Floats:
    """Chances of each node's children, given that it is accepted, [*shape, topk]."""
    first = head[0] + (head[1] - head[0]) * min(depth, 5) / 5
    easy = (chance.random(shape) < (first - _HARD[0]) / (_EASY[0] - _HARD[0]))[..., None]
    return np.concatenate([np.where(easy, _EASY[0], _HARD[0]), np.where(easy, _EASY[1], _HARD[1]) * _OTHERS], axis=-1)[
        ..., :topk
    ]


class World:
    """Requests of one head and context on one machine. All numbers of trees are means over many."""

    def __init__(
        self, machine: MachineCosts, head: tuple[float, float], context: int = min(CONTEXTS), seed: int = 0
    ) -> None:
        self.machine, self.fixed, self.head, self.costs = machine, machine.fixed, head, machine.costs()
        params, self.context = SamplingParams(max_tokens=10**6, seed=0, temperature=0.0), context
        self.decodes = [Decode(n, context, 0, RequestSampling(params, key=n)) for n in range(max(BATCHES))]
        self.chance = np.random.default_rng(seed)
        widths, levels = (1, 2, 3, 4, 6, 8), range(1, TREE.steps + 1)
        sizes = (*range(2, 9), 10, 12, 16, 24, 32, 48, 64) if machine.fixed else (TREE.nodes,)
        shapes = (TreeShape(*each) for each in product(levels, sizes, widths))
        self.options = [each for each in shapes if not machine.fixed or each.steps < each.nodes <= 1 + _pool(each)]
        self.least = np.array([-math.inf]) if machine.fixed else np.log(np.linspace(0.95, 0.005, 24))
        whole = TreeShape(TREE.steps, 1 + TREE.nodes * TREE.topk, TREE.topk)
        known = Prospects(1, [TreeShape(0, 1), *self.options], self.least)
        found = known.evaluate(*grown(self.chance, head, whole, TREES))
        self._tokens, self._nodes = (each.mean(axis=0)[1:] for each in found[:2])  # [options, least chances]

    def cycle(self, requests: int, shape: TreeShape, least_logp: float = -math.inf) -> tuple[float, Outcome]:
        """Tokens per second of a cycle with such trees, or without if they have no steps; and what it teaches."""
        costs, tokens, nodes = self.costs, 0.0, 0.0
        if shape.steps:
            option, place = self.options.index(shape), int(np.abs(np.exp(self.least) - math.exp(least_logp)).argmin())
            tokens = float(self._tokens[option, place])
            nodes = shape.nodes - 1 if self.fixed else float(self._nodes[option, place])
        rows = requests * (1 + nodes)
        kv = float(costs.kv_cost(requests * self.context, 1 + nodes))
        stages = {"verify": costs.verify.at(rows, kv)}
        forwards, fed, extended = max(0, shape.steps - 1), float(requests * shape.topk), 0.0
        if shape.steps:
            extended = float(extended_rows(requests, shape.steps))
            stages["extend"] = costs.extend.at(extended)
            stages["propose"] = float(draft_steps(forwards)) * costs.step.at(fed)
        seconds, kept = sum(stages.values()) + costs.between, requests * (1 + tokens)
        drafting = range(requests if shape.steps else 0)
        of = self.decodes[:requests], drafting, round(kept), seconds, costs.between, stages
        return kept / seconds, Outcome(*of, rows=rows, extended=extended, forwards=forwards, fed=fed)

    def lesson(self, made: CycleBudget, outcome: Outcome) -> LessonOutcome:
        """The outcome with trees. No node is tried: estimates are right from the start."""
        shape = TreeShape(made.steps, made.nodes, made.topk or TREE.topk)
        logp, parents = grown(self.chance, self.head, shape, len(made.drafting))
        return LessonOutcome(
            **vars(outcome),
            shape=made.shape,
            logp=logp.astype(np.float32),
            parents=parents,
            guesses=logp.astype(np.float32),
            verified_parents=parents,
            depths=parents,
            is_node=np.zeros(parents.shape, dtype=np.bool_),
            path=np.zeros((len(parents), 1), dtype=np.int64),
        )

    def best(self, requests: int) -> float:
        """Tokens per second with the best of all trees, or without."""
        return max(self.cycle(requests, *each)[0] for each in product([TreeShape(0, 1), *self.options], self.least))


def _pool(shape: TreeShape) -> int:
    """Nodes that are drafted."""
    return shape.topk + (shape.steps - 1) * shape.topk**2


def chosen(world: World, requests: int, before: int = 0) -> tuple[float, float]:
    """Speeds under a budget as parts of the best speed: of what it chooses, and with its lessons and plain cycles.

    `before`: the number of requests until then, if it was another one.
    """
    shapes: dict[int, Sequence[TreeShape]] = {}
    if world.fixed:
        sizes = bucket_sizes(max(BATCHES))
        shapes = {each: TREE.captured_shapes(each, TREE.topk, adaptive=True)[:-1] for each in sizes}
    estimates = AcceptanceEstimates(torch.device("cpu"))
    most, largest = len(world.decodes), (TREE.steps, TREE.nodes)
    costs = world.machine.costs()

    def forwards(shape: TreeShape) -> tuple[int, int]:
        return shape.steps - 1, shape.topk or TREE.topk

    budget = AdaptiveBudget(most, largest, costs, estimates, forwards, TREE.topk, shapes)
    choices, tokens, seconds = list[float](), 0.0, 0.0
    for cycle in range(-SETTLING, CYCLES):
        decodes = world.decodes[: before if before and cycle < 0 else requests]
        made = budget.choose(decodes, [True] * len(decodes))
        shape = TreeShape(made.steps, made.nodes, made.topk or TREE.topk) if made.drafting else TreeShape(0, 1)
        speed, outcome = world.cycle(len(decodes), shape, made.least_logp)
        outcome = replace(outcome, drafting=made.drafting, is_lesson=made.is_lesson)
        budget.learn(world.lesson(made, outcome) if made.is_lesson and made.drafting else outcome)
        if cycle >= 0:
            tokens, seconds = tokens + speed * outcome.seconds, seconds + outcome.seconds
            is_measured = not made.drafting and budget.state().steps  # plain decoding, beside a choice to draft
            choices += [] if made.is_lesson or is_measured else [speed]
    best = world.best(requests)
    return float(np.mean(choices)) / best, tokens / seconds / best


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, then the least of its numbers."""
    parser = argparse.ArgumentParser(prog="python -m eagle_tools.bench.budget", description=__doc__)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--out", type=Path, help="folder for JSON")
    args = parser.parse_args(arguments)
    console, rows = Console(), list[tuple[str, str, int, int, float, float, float]]()
    cases = list(product(args.machines, HEADS, CONTEXTS))
    for name, head, context in track(cases, description="simulate"):
        machine = MACHINES[name]
        fitting = [each for each in BATCHES if context == min(CONTEXTS) or each * context <= machine.kv]
        if not fitting:
            continue
        world = World(machine, HEADS[head], context)
        for requests in fitting:
            other = max(BATCHES) if requests < OTHER else 1
            after = chosen(world, requests, other)[1] if context == min(CONTEXTS) else math.nan
            rows.append((name, head, context, requests, *chosen(world, requests), after))
    table = Table("machine", "head", "context", "requests", "chosen / best", "with lessons", "after another load")
    for name, head, context, requests, *parts in rows:
        shown = ("" if math.isnan(part) else f"{part:.2f}" for part in parts)
        table.add_row(name, head, f"{context:,}", str(requests), *shown)
    console.print(table)
    if args.out:
        write_json(args.out / "budget.json", {"tree": TREE, "cycles": CYCLES}, {"rows": rows})
    console.print(f"least {min(row[4] for row in rows):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
