"""Drafters that are restricted to some tokens draft these alone, and no text changes (FR-Spec)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.drafters import CASES
from tests.lossless.pairs import Pairs, loaded_head
from tests.lossless.scenes import REQUESTS, as_on_a_gpu
from tests.support.covering import deep_unless
from tests.support.engines import run, tokens_of

IDS = torch.randperm(64, generator=torch.Generator().manual_seed(4))[:32]  # in no order
QUICK = ("NEXTN", "EAGLE", "STANDALONE", "MEDUSA unsorted", "DFLASH 2")
NAMES = (
    *QUICK,
    *("NEXTN chain", "NEXTN of three layers", "NEXTN+NGRAM", "EAGLE static tree", "STANDALONE chain", "REDRAFTER"),
    *("DFLASH", "DFLASH with DSpark's head", "DFLASH with Domino's head", "FROZEN_KV_MTP"),
)


@pytest.mark.parametrize("settings", [dict, lambda: as_on_a_gpu((2, 8))], ids=["eager", "captured"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=deep_unless(name in QUICK)) for name in NAMES])
def test_texts_are_the_same_and_drafts_are_within_the_map(
    name: str, settings: Any, pairs: Pairs, tmp_path: Path
) -> None:
    case = CASES[name]
    pair = pairs.pair_of(case.maker)
    assert pair.draft is not None
    torch.save(IDS, tmp_path / "map.pt")
    head = loaded_head(pair.kind, pair.directory, pair.draft, pair.target, tmp_path / "map.pt")
    assert head.draft_vocab_size == len(IDS)
    engine = case.engine(replace(pair, head=head), **settings())
    drafted, drafter = set[int](), engine.worker.drafter
    model: Any = getattr(drafter, "model", drafter)  # a mixture's n-grams draft all tokens
    propose = model.propose

    def watched(*args: Any) -> Any:
        tree = propose(*args)
        drafted.update(tree.tokens[:, 1:].flatten().tolist())
        return tree

    model.propose = watched
    outcome = run(engine, REQUESTS)
    assert tokens_of(outcome) == pairs.texts(pair)
    assert len(drafted) > 10 and drafted <= {-1, *IDS.tolist()}
    sampled = {each.request_id for each in REQUESTS if each.sampling.temperature == 1.0}
    for chosen in (sampled, outcome.keys() - sampled):
        specs = [outcome[each].spec for each in chosen]
        assert sum(spec.accepted for spec in specs if spec is not None) > 0
    assert engine.stats().accepted_tokens < engine.stats().drafted_tokens
