"""Draft trees for requests that asked for them: one request's tree out of the batch, without padding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from msgspec.structs import replace as replaced
from torch import Tensor

from eagle_server.plan import SequenceOutput
from eagle_server.request import DraftTree
from eagle_server.speculation.tree import Tree

PADDING = -1


def drafted_nodes(tree: Tree) -> tuple[Tensor, ...]:
    """The tensors that `draft_tree` needs: tokens and parents [bs, D], and scores [bs, D - 1] if the drafter has
    any."""
    nodes = (tree.tokens, tree.parents)
    return nodes if tree.scores is None else (*nodes, tree.scores)


def draft_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float] | None,
    path: Sequence[int],
    emitted: Sequence[int],
) -> DraftTree:
    """One request's tree, renumbered without padding.

    `path` has the accepted nodes, the root first, then -1. `emitted` are the tokens after these nodes; there are fewer
    if the request failed within the path.
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


def with_steps(
    outputs: tuple[SequenceOutput, ...], steps: int, drafting: Collection[int]
) -> tuple[SequenceOutput, ...]:
    """The outputs of a cycle's decodes, with the levels that were drafted in their trees: `steps` for `drafting`."""
    if all(output.tree is None for output in outputs):
        return outputs
    return tuple(
        output if output.tree is None else replace(output, tree=replaced(output.tree, steps=steps * (i in drafting)))
        for i, output in enumerate(outputs)
    )
