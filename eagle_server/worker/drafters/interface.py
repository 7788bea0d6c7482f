"""The drafter contract. Every drafter proposes a tree of candidate tokens, and the cycle knows none by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBackend
from eagle_server.plan import TreeShape
from eagle_server.speculation.tree import Tree
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.batch.batch import DecodeBatch, Prompts
from eagle_server.worker.graphs import Graphs

State = TypeVar("State")
Found = TypeVar("Found", covariant=True)
Given = TypeVar("Given", contravariant=True)


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


class Reader(Protocol[Found]):
    """Keeps what a drafter knows of each text up to date. The cycle does not look into what `extend` found."""

    uses_features: bool  # it reads prompts and accepted tokens, each with a feature of the target
    reads_late: bool  # `prefill` may get the pairs of a prompt as late as when its request first drafts, without chunks
    # `extend` reads device tensors and host lengths alone, what it finds has `rows_of(requests)`, and its rows fit into
    # the slots behind a text to which the newest tokens are not yet added.
    extends_ahead: bool

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        ...

    def prefill(self, prompts: Prompts) -> None:
        """Feed pieces of prompts."""
        ...

    def extend(self, batch: DecodeBatch) -> Found:
        """Feed the newly accepted tokens, `batch.accepted_tokens`; returns the state to propose from."""
        ...


class Proposer(Protocol[Given]):
    """Proposes trees from what a reader found."""

    steps: int  # levels of its deepest tree
    widest: int  # the largest topk that a budget may choose; 1: it has no choice
    proposes_ahead: bool  # a captured `propose` too, and the host's lengths may be out of date

    def propose(self, draft: Given, batch: DecodeBatch) -> Tree:
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


class Drafter(Reader[State], Proposer[State], Protocol[State]):
    """Both. The state passes from `extend` to `propose`."""


class ModelDrafter(Generic[State]):
    """A reader and a proposer of its own."""

    def __init__(self, reader: Reader[State], proposer: Proposer[State]) -> None:
        self.reader, self.proposer = reader, proposer
        self.uses_features, self.reads_late = reader.uses_features, reader.reads_late
        self.extends_ahead, self.proposes_ahead = reader.extends_ahead, proposer.proposes_ahead
        self.steps, self.widest = proposer.steps, proposer.widest
        self.forget, self.prefill, self.extend = reader.forget, reader.prefill, reader.extend
        self.propose, self.forwards = proposer.propose, proposer.forwards


class DraftVocabulary(Protocol):
    """The tokens that a head drafts."""

    @property
    def draft_vocab_size(self) -> int: ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> target ids, int64."""
        ...


class ScoringHead(DraftVocabulary, Protocol):
    """A head's scores over its draft vocabulary."""

    def logits(self, normed: Tensor, /) -> Tensor:
        """[rows, H] -> [rows, draft vocabulary]."""
        ...


def vocabulary_of(head: DraftVocabulary, device: torch.device) -> Tensor | None:
    """Target ids of the draft vocabulary, int64 [draft vocabulary]; None: they are the same."""
    draft_ids = torch.arange(head.draft_vocab_size, device=device)
    ids = head.target_ids(draft_ids)
    return None if ids.equal(draft_ids) else ids
