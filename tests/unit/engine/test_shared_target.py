"""A target keeps nothing of one engine's forwards that another engine over it could read."""

from __future__ import annotations

import pytest

from eagle_server.engine.engine import Engine
from eagle_server.models.targets.decoder import TargetModel
from tests.support.engines import plain, random_head, random_target, request, run, speculative

REQUESTS = [request(i, range(1 + i, 8 + 5 * i), seed=i, temperature=0.7 * i, ignore_eos=True) for i in range(3)]


def engine_over(target: TargetModel, kind: str) -> Engine:
    return plain(target) if kind == "plain" else speculative(target, random_head(target, kind), 3, 4)


def outcome(engine: Engine) -> list[tuple[list[int], object]]:
    """Texts, and how many drafts were accepted, which depends on the features."""
    found = run(engine, REQUESTS)
    return [(found[each.request_id].tokens, found[each.request_id].spec) for each in REQUESTS]


@pytest.mark.parametrize("kinds", [("EAGLE3", "plain"), ("plain", "EAGLE3"), ("EAGLE", "EAGLE3")], ids="-".join)
def test_two_engines_over_one_target_give_what_each_gives_alone(kinds: tuple[str, str]) -> None:
    alone = [outcome(engine_over(random_target(), kind)) for kind in kinds]
    shared = random_target()
    engines = [engine_over(shared, kind) for kind in kinds]
    assert [outcome(engine) for engine in engines] == alone
    assert outcome(engines[0]) == alone[0], "after the other one has run"
    assert [tokens for tokens, _ in alone[0]] == [tokens for tokens, _ in alone[1]]
