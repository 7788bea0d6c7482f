"""The search: measure accuracies, grow trees, time them, choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from eagle_tools.training.tree_search.cost import Cost, measure_costs
from eagle_tools.training.tree_search.counts import RankCounts
from eagle_tools.training.tree_search.growth import Accuracies, Choice, comb_tree, expected_tokens, grow, level_tree
from eagle_tools.training.tree_search.tree_engines import Task, TreeEngines, complete

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes, the root not counted
_NEAR = 3  # sizes to try with shallower trees: the best and its neighbours


@dataclass(frozen=True)
class Candidate:
    """A tree that was timed. `choices` is empty for plain decoding, and for drafters that make their own trees."""

    nodes: int
    steps: int
    choices: tuple[Choice, ...]
    expected: float | None  # tokens per cycle by the measured accuracies; None if the drafter makes its own trees
    cost: Cost
    batch: int

    @property
    def tokens(self) -> float:
        """Tokens per request and cycle: expected, or measured while it was timed."""
        return self.cost.tokens_per_cycle(self.batch) if self.expected is None else self.expected

    @property
    def speed(self) -> float:
        """Tokens per second of the whole batch."""
        return self.tokens * self.batch / self.cost.seconds


@dataclass(frozen=True)
class Trial:
    """Tokens per request and cycle of one tree, on texts that were not used to grow it."""

    name: str
    nodes: int
    expected: float | None
    tokens: float
    cycles: int


def measure_accuracies(engines: TreeEngines) -> RankCounts:
    """Continue the task's prompts with wide trees, and count.

    A static tree is measured twice: the second tree is wide where nodes of the first were accepted.
    """
    counts, rounds = RankCounts(engines.steps, engines.ranks), 2 if engines.algorithm == "MEDUSA" else 1
    with tqdm(total=rounds * len(engines.task.prompts), desc="measure acceptance", unit="text") as bar:
        accuracies: Accuracies | None = None
        for _ in range(rounds):
            counts = RankCounts(engines.steps, engines.ranks)
            complete(engines.make(*engines.measuring(accuracies)), engines.task, counts.add, bar.update)
            accuracies = counts.accuracies()
    return counts


def time_sizes(engines: TreeEngines, accuracies: Accuracies, rounds: int, nodes: int | None) -> list[Candidate]:
    """Time plain decoding, and the best tree of every size in SIZES and of size `nodes`."""
    sizes = sorted({*SIZES, *(() if nodes is None else (nodes,))})
    if engines.option is None:
        return _time_own(engines, [size for size in sizes if size <= engines.most_own_nodes()], rounds)
    order = [grown.choice for grown in grow(accuracies, max(sizes))]
    return _time(engines, accuracies, [(), *(tuple(order[:size]) for size in sizes if size <= len(order))], rounds)


def time_shallower(
    engines: TreeEngines, accuracies: Accuracies, timed: Sequence[Candidate], rounds: int
) -> list[Candidate]:
    """Time plain decoding, and the fastest of `timed` and its neighbours in size with every possible number of steps.

    All are timed again, because the load of the machine may have changed.
    """
    drafting = [candidate for candidate in timed if candidate.choices]
    best = max(range(len(drafting)), key=lambda place: drafting[place].speed)
    near = drafting[max(0, best - _NEAR // 2) : best + _NEAR // 2 + 1]
    trees = dict.fromkeys(
        tuple(grown.choice for grown in grow(accuracies, candidate.nodes, steps))
        for candidate in near
        for steps in range(1, candidate.steps + 1)
    )
    return _time(engines, accuracies, [(), *trees], rounds)


def check(engines: TreeEngines, task: Task, accuracies: Accuracies, chosen: Candidate) -> list[Trial]:
    """Serve the tree that was found, and others of its size, on texts that were not used to grow it."""
    assert engines.option is not None
    guesses = [("full levels, all nodes alike", level_tree(chosen.nodes, engines.steps, engines.ranks))]
    guesses += [("alternatives to the best path only", comb_tree(chosen.nodes, chosen.steps))]
    trees = [("the tree found", list(chosen.choices)), *guesses]
    distinct = {frozenset(tree): (name, tree) for name, tree in reversed(trees)}  # a guess may equal the tree found
    runs: list[tuple[str, float | None, tuple[str, ...]]] = [
        (name, expected_tokens(accuracies, tree), engines.static(tree)) for name, tree in reversed(distinct.values())
    ]
    if engines.algorithm != "MEDUSA" and chosen.nodes <= engines.most_own_nodes():
        runs.append(("the head's own trees, best by its scores", None, engines.own_trees(chosen.nodes)))
    trials = []
    with tqdm(total=len(runs) * len(task.prompts), desc="check on other texts", unit="text") as bar:
        for name, expected, flags in runs:
            tally = RankCounts(0, 0)
            complete(engines.make(*flags), task, tally.add, bar.update)
            trials.append(Trial(name, chosen.nodes, expected, tally.emitted / tally.cycles, tally.cycles))
    return trials


def _time(
    engines: TreeEngines, accuracies: Accuracies, trees: Sequence[tuple[Choice, ...]], rounds: int
) -> list[Candidate]:
    costs = _costs(engines, [engines.static(tree) if tree else None for tree in trees], rounds)
    return [
        Candidate(
            len(tree),
            max(map(len, tree), default=0),
            tree,
            expected_tokens(accuracies, tree),
            cost,
            engines.task.batch,
        )
        for tree, cost in zip(trees, costs, strict=True)
    ]


def _time_own(engines: TreeEngines, sizes: Sequence[int], rounds: int) -> list[Candidate]:
    costs = _costs(engines, [None, *(engines.own_trees(size) for size in sizes)], rounds)
    return [
        Candidate(size, engines.steps if size else 0, (), None, cost, engines.task.batch)
        for size, cost in zip([0, *sizes], costs, strict=True)
    ]


def _costs(engines: TreeEngines, flags: Sequence[Sequence[str] | None], rounds: int) -> list[Cost]:
    made = [engines.plain() if tree is None else engines.make(*tree) for tree in flags]
    with tqdm(total=rounds, desc=f"time {len(made)} sizes of trees", unit="round") as bar:
        return measure_costs(made, engines.task, rounds, bar.update)
