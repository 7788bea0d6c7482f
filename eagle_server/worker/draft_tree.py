"""What was drafted, for requests that want to know: from a batch's trees to each one's own, without padding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eagle_server.request import DraftTree
from eagle_server.speculation.tree import EagleVerifyInput

PADDING = -1


def drafted_nodes(tree: EagleVerifyInput) -> tuple[Tensor, ...]:
    """Tokens and parents [bs, D], and where there are any the scores [bs, D - 1]: what `draft_tree` is made of."""
    nodes = (tree.draft_token.view_as(tree.parents), tree.parents)
    return nodes if tree.scores is None else (*nodes, tree.scores)


def draft_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float] | None,
    path: Sequence[int],
    emitted: Sequence[int],
) -> DraftTree:
    """One request's tree, its nodes numbered anew without padding.

    `path` has the accepted nodes, the root first, -1 where it is over; `emitted` are the tokens after these nodes,
    fewer where the request failed on the way.
    """
    kept = [node for node, token in enumerate(tokens) if token != PADDING]
    number = {PADDING: PADDING, **{node: place for place, node in enumerate(kept)}}
    walked = [number[node] for node in path if node > 0]
    full = DraftTree(
        token_ids=[tokens[node] for node in kept],
        parents=[number[parents[node]] for node in kept],
        scores=None if scores is None else [scores[node - 1] if node else 0.0 for node in kept],
        path=walked,
        bonus=emitted[-1] if len(emitted) > len(walked) else None,
    )
    return full.cut(len(emitted))
