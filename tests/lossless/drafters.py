"""All drafters with all kinds of trees that they draft. The shared tests run over all of CASES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_server.engine.assembly.assemble import Surroundings, assemble
from eagle_server.engine.engine import Engine
from eagle_server.speculation.static_tree import parse_choices, ranks_of, steps_of
from tests.lossless import pairs
from tests.lossless.pairs import Maker, Pair
from tests.support.engines import engine_config, tree_size


@dataclass(frozen=True)
class Case:
    """A drafter: the function that makes its pair, and the trees that it drafts.

    `size`: verified nodes; None is the largest dynamic tree of `steps` and `topk`. `tree`: a static tree, by name or as
    a list. `stages`: the number of functions captured into graphs, per batch size.
    """

    maker: Maker
    steps: int = 0
    topk: int = 1
    size: int | None = None
    tree: str = ""
    ngrams: int = 0  # steps of the tries
    stages: int = 3

    @property
    def branches(self) -> bool:
        """Whether a tree may be more than a chain. Only then do the attention modes for trees differ."""
        return bool(self.topk > 1 or self.tree or self.ngrams)

    @property
    def numbers(self) -> dict[str, Any]:
        ngrams = {"ngram_steps": self.ngrams}
        if self.tree:
            choices = parse_choices(self.tree)
            steps, ranks, size = steps_of(choices), ranks_of(choices), self.size or len(choices) + 1
            return {"choices": choices, "model_steps": steps, "topk": ranks, "nodes": size, **ngrams}
        size = self.size or (tree_size(self.steps, self.topk) if self.steps else 1)
        return {"model_steps": self.steps, "topk": self.topk, "nodes": size, **ngrams}

    def engine(self, pair: Pair, *, stand_ins: Mapping[str, Any] | None = None, **settings: Any) -> Engine:
        """An engine with poisoned free slots. `settings` are those of `engine_config`, `stand_ins` of `assemble`."""
        config = engine_config(**{**self.numbers, **settings})
        return assemble(pair.target, pair.head, config, Surroundings(**(stand_ins or {})))


UNEQUAL = "[(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (2, 1), (0, 0, 0), (0, 0, 1), (2, 1, 0), (0, 0, 0, 0)]"
UNSORTED = "[(3,), (0, 0), (0,), (3, 1), (1,), (0, 0, 2)]"

CASES = {
    "NONE": Case(pairs.alone, stages=1),
    "EAGLE": Case(pairs.eagle, 3, 4),
    "EAGLE3": Case(pairs.eagle3, 3, 4),
    "EAGLE3 chain": Case(pairs.eagle3, 4, 1),
    "EAGLE3 drafting more than it verifies": Case(pairs.eagle3, 5, 4, size=5),
    "EAGLE static tree": Case(pairs.eagle, tree="[(0,), (1,), (3,)]", stages=2),
    "EAGLE3 static tree": Case(pairs.eagle3, tree=UNEQUAL),
    "NEXTN": Case(pairs.nextn, 3, 4),
    "NEXTN chain": Case(pairs.nextn, 3, 1),
    "NEXTN of GLM": Case(pairs.nextn_glm, 3, 4),
    "NEXTN of three layers": Case(pairs.nextn_layers, 4, 3),
    "MEDUSA": Case(pairs.medusa, tree="mc_sim_7b_63", stages=2),
    "MEDUSA unsorted": Case(pairs.medusa, tree=UNSORTED, stages=2),
    "REDRAFTER": Case(pairs.redrafter, 3, 4, stages=2),
    "REDRAFTER drafting more than it verifies": Case(pairs.redrafter, 5, 3, size=6, stages=2),
    "STANDALONE": Case(pairs.standalone, 3, 4),
    "STANDALONE chain": Case(pairs.standalone, 4, 1),
    "STANDALONE+NGRAM": Case(pairs.standalone, 2, 2, size=4, ngrams=8, stages=4),
    "MEDUSA+NGRAM": Case(pairs.medusa, tree=UNSORTED, size=10, ngrams=5, stages=3),
    "REDRAFTER+NGRAM": Case(pairs.redrafter, 3, 4, size=12, ngrams=5, stages=3),
    "NGRAM": Case(pairs.alone, size=9, ngrams=5, stages=1),
    "EAGLE3+NGRAM": Case(pairs.eagle3, 3, 4, size=12, ngrams=5, stages=4),
    "NEXTN+NGRAM": Case(pairs.nextn, 3, 4, size=12, ngrams=5, stages=4),
    "DFLASH": Case(pairs.dflash, 4, 4),
    "DFLASH chain": Case(pairs.dflash, 3, 1),
    "DFLASH with layers of two kinds": Case(pairs.dflash_sliding, 4, 3),
    "DFLASH+NGRAM": Case(pairs.dflash, 4, 2, size=12, ngrams=5, stages=4),
    "DFLASH 2": Case(pairs.dflash2, 4, 3),
    "DFLASH with DSpark's head": Case(pairs.dspark, 4, 4),
    "DFLASH with Domino's head": Case(pairs.domino, 4, 4),
    "PEAGLE": Case(pairs.peagle, 4, 4),
    "PEAGLE chain": Case(pairs.peagle, 4, 1),
    "PEAGLE+NGRAM": Case(pairs.peagle, 4, 2, size=12, ngrams=5, stages=4),
    "FROZEN_KV_MTP": Case(pairs.frozen_kv, 3, 2, stages=1),
}
