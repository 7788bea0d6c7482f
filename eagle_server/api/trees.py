"""Draft trees as clients see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from eagle_server.api.responses import finite
from eagle_server.request import DraftTree


class Tree(msgspec.Struct):
    """One cycle's tree, in the terms of `request.DraftTree`, its tokens spelled."""

    tokens: list[str]
    parents: list[int]
    scores: list[float] | None
    accepted: list[int]
    bonus: str | None


def trees_of(trees: Sequence[DraftTree], spell: Callable[[int], str]) -> list[Tree]:
    """The trees of successive cycles."""
    return [
        Tree(
            tokens=[spell(token_id) for token_id in tree.token_ids],
            parents=tree.parents,
            scores=None if tree.scores is None else [finite(score) for score in tree.scores],
            accepted=tree.path,
            bonus=None if tree.bonus is None else spell(tree.bonus),
        )
        for tree in trees
    ]
