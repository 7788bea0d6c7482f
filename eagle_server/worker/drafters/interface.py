"""The drafter contract. Every drafter proposes a tree of candidate tokens, and the cycle knows none by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from eagle_server.attention.interface import AttentionBackend
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree import Tree
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.graphs import Graphs

State = TypeVar("State")


def _no_kv(graph_rows: Collection[int]) -> AttentionBackend:
    raise ValueError(f"a model without KV has no attention, not even over {graph_rows} rows")


@dataclass(frozen=True)
class DrafterSetup:
    """What a drafter is made from, beside its model.

    graph_sizes: batch sizes that graphs are captured for. requests: rows of req_to_token.
    attention: the backend over the model's KV, whose forwards of these numbers of rows per request are captured.
    per_node: attention computes each node of a step as a decode query of its own, and every step is planned.
    """

    tree: TreeConfig
    device: torch.device
    graphs: Graphs = field(default_factory=Graphs)
    graph_sizes: Collection[int] = ()
    attention: Callable[[Collection[int]], AttentionBackend] = _no_kv
    per_node: bool = False
    requests: int = 1


class Drafter(Protocol[State]):
    """Proposes trees. `State` passes from `extend` to `propose`; the cycle does not look into it."""

    uses_features: bool  # it reads prompts and accepted tokens, each with a feature of the target
    reads_late: bool  # `prefill` may get the pairs of a prompt as late as when its request first drafts, without chunks
    steps: int  # levels of its deepest tree
    widest: int  # the largest topk that a budget may choose; 1: it has no choice
    extends_ahead: bool  # `extend` reads device tensors and host lengths alone, and its State has `rows_of(requests)`
    proposes_ahead: bool  # so does a captured `propose`, and the host's lengths may be out of date

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        ...

    def prefill(self, prompts: Prompts) -> None:
        """Feed pieces of prompts."""
        ...

    def extend(self, batch: DecodeBatch) -> State:
        """Feed the newly accepted tokens, `batch.accepted_tokens`; returns the state to propose from."""
        ...

    def propose(self, draft: State, batch: DecodeBatch) -> Tree:
        """The tree of each decoding request under verified_id, ranked by `batch.ranking`, with scores.

        A model drafts `batch.steps` levels, and feeds `batch.topk` nodes of each (0: `widest`). A tree has at most
        `batch.nodes` nodes, root included.
        """
        ...

    def forwards(self, shape: TreeShape) -> tuple[int, int]:
        """How many forwards `propose` needs for trees of a shape, and the rows of each request that one feeds.

        0 forwards: its time does not depend on the shape.
        """
        ...
