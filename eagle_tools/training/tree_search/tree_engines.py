"""One target and one draft, loaded once, and engines over them with the trees to try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle_server.algorithms import ALGORITHMS
from eagle_server.config import Config, ConfigError, parse_args
from eagle_server.config.commands import without_drafting
from eagle_server.engine.assembly.from_config import LoadedModels, engine_over, load_models
from eagle_server.engine.engine import Engine
from eagle_server.request import Request, SamplingParams
from eagle_tools.training.tree_search.growth import Accuracies, Choice, wide_tree
from eagle_tools.tree.record import DraftedTree, recorded

WIDE = 256  # nodes of a static tree to measure with


@dataclass(frozen=True)
class Task:
    """The requests to run: prompts as token ids, how they are continued, and how many at a time."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    batch: int

    def request(self, number: int, *, endless: bool = False) -> Request:
        """Request `number`. After the last prompt it starts again with the first one and another seed."""
        prompt = self.prompts[number % len(self.prompts)]
        sampling = SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=number, ignore_eos=endless
        )
        return Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)


class TreeEngines:
    """Makes engines. `flags` choose models and device as in serving; `steps` and `ranks` limit the trees."""

    def __init__(self, flags: Sequence[str], task: Task, steps: int, ranks: int, nodes: int) -> None:
        self.flags, self.task, self.ranks = list(flags), task, ranks
        self._pool = ranks + (steps - 1) * ranks**2
        self._window = max(self._pool, WIDE, nodes, 64) + 1
        config = self._config()
        if not config.speculates:
            raise ConfigError(
                "nothing is drafted here: --draft HEAD, or --algorithm NEXTN or NGRAM, says what to measure"
            )
        self.models: LoadedModels = load_models(config, lookahead=self._window)
        draft = self.models.draft
        kind = "" if draft is None else draft.algorithm
        self.algorithm = "+".join(filter(None, (kind, "NGRAM" if config.speculative.drafts_ngrams else "")))
        self.steps = min(steps, steps if draft is None or draft.max_steps is None else draft.max_steps)

    @property
    def option(self) -> str | None:
        """The server's option for a static tree of this drafter; None if it makes its own trees."""
        row = ALGORITHMS.get(self.algorithm)
        if row is None or row.static_tree is None:
            return None
        return row.static_tree.flag

    def make(self, *flags: str) -> Engine:
        """An engine with these trees, for a batch of the task's requests."""
        return engine_over(self.models, self._config(*flags))

    def plain(self) -> Engine:
        """An engine without speculation. Make it before others, because it sets the target to return no features."""
        base = without_drafting(self.flags)
        return engine_over(self.models, self._config("--speculative-algorithm", "NONE", base=base))

    def static(self, choices: Sequence[Choice]) -> tuple[str, ...]:
        """Flags for a static tree."""
        assert self.option is not None
        return (self.option, str(list(choices)))

    def own_trees(self, nodes: int) -> tuple[str, ...]:
        """Flags for the drafter's own trees with `nodes` nodes, the root not counted."""
        size = ("--speculative-num-draft-tokens", str(nodes + 1))
        if self.algorithm == "MEDUSA+NGRAM":  # Medusa keeps its default tree
            return size
        topk = () if self.algorithm == "NGRAM" else ("--topk", str(self.ranks))
        return ("--speculative-num-steps", str(self.steps), *topk, *size)

    def most_own_nodes(self) -> int:
        """The largest size of the drafter's own trees."""
        return {"REDRAFTER": self.steps * self.ranks, "NGRAM": WIDE, "MEDUSA+NGRAM": WIDE}.get(
            self.algorithm, self._pool
        )

    def measuring(self, accuracies: Accuracies | None) -> tuple[str, ...]:
        """Flags for trees to measure with.

        Heads that draft level by level verify all nodes that they scored. Medusa's static tree has children of all
        ranks below its likely nodes, by the accuracies so far or by a guess. Other drafters draft as much as they can.
        """
        if self.algorithm != "MEDUSA":
            return self.own_trees(self.most_own_nodes())
        guess = [[0.6 * 0.5**rank for rank in range(self.ranks)]] * self.steps
        return self.static(wide_tree(accuracies or guess, WIDE))

    def _config(self, *flags: str, base: Sequence[str] | None = None) -> Config:
        longest = max(map(len, self.task.prompts)) + self.task.max_tokens + 1
        numbers = {
            "--max-running-requests": self.task.batch,
            "--max-total-tokens": self.task.batch * (longest + self._window),
        }
        sizes = [text for flag, number in numbers.items() for text in (flag, str(number))]
        given = [*(self.flags if base is None else base), *flags]
        fixed = [] if "NONE" in given else ["--speculative-adaptive", "off"]
        return parse_args([*given, *sizes, *fixed, "--disable-radix-cache"], environ={})


def complete(
    engine: Engine, task: Task, record: Callable[[list[DraftedTree]], None], done: Callable[[], object]
) -> None:
    """Run all of the task's prompts to their end; `done` is called after each.

    Raises:
        ValueError: a request was refused, or failed.
    """
    for number in range(len(task.prompts)):
        engine.add(task.request(number))
    with recorded(engine.worker, record):
        while engine.has_work():
            for delta in engine.step():
                if delta.error is not None:
                    raise ValueError(delta.error)
                if delta.finish_reason is not None:
                    done()
