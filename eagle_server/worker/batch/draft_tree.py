"""Draft trees for requests that asked for them: one request's tree out of the batch, without padding."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_server.request import DraftTree

PADDING = -1


def draft_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float] | None,
    path: Sequence[int],
    emitted: Sequence[int],
    steps: int,
) -> DraftTree:
    """One request's tree, renumbered without padding.

    `path` has the accepted nodes, the root first, then -1. `emitted` are the tokens after these nodes; there are fewer
    if the request failed within the path. `steps`: the levels that were drafted.
    """
    kept = [node for node, token in enumerate(tokens) if token != PADDING]
    number = {PADDING: PADDING, **{node: place for place, node in enumerate(kept)}}
    walked = [number[node] for node in path if node > 0]
    full = DraftTree(
        token_ids=[tokens[node] for node in kept],
        parents=[number[parents[node]] for node in kept],
        scores=None if scores is None else [scores[node - 1] if node else 0.0 for node in kept],
        path=walked,
        steps=steps,
        bonus=emitted[-1] if len(emitted) > len(walked) else None,
    )
    return full.cut(len(emitted))
