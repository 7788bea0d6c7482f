"""What a cycle teaches the budget, as values on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_server.plan import Decode, TreeShape


@dataclass(frozen=True, eq=False)
class Outcome:
    """One cycle with decodes."""

    decodes: Sequence[Decode]
    drafting: Sequence[int]  # numbers of the decodes that drafted, in order
    tokens: int  # that all requests keep
    seconds: float  # since the end of the cycle before
    waited: float  # of these, those that belong to no stage
    stages: Mapping[str, float]  # seconds by stage
    rows: float  # of the verify forward
    joined: int = 0  # rows of prompts in the same forward
    read: int = 0  # rows of backlogs and prompts that the drafter had not read
    extended: float = 0.0  # rows of draft-extend
    forwards: int = 0  # draft steps after draft-extend
    fed: float = 0.0  # rows that each draft step feeds, of all requests
    has_prompts: bool = False  # prompts were computed as well
    is_lesson: bool = False
    is_measured: bool = True  # False: of the stages only that of prompts has its time


@dataclass(frozen=True, eq=False, kw_only=True)
class LessonOutcome(Outcome):
    """A lesson in which requests drafted, with the trees of these, in order. In numbers of nodes the root is 0."""

    shape: TreeShape
    # As drafted, n >= 1 nodes without the root.
    logp: NDArray[np.float32]  # [requests, n], log chances of the nodes' paths, -inf for padding
    parents: NDArray[np.int64]  # [requests, n], numbers of their parents
    # As verified, m >= 1 nodes without the root.
    guesses: NDArray[np.float32]  # [requests, m], the drafter's log chances, given the parent
    verified_parents: NDArray[np.int64]  # [requests, m], numbers of their parents
    depths: NDArray[np.int64]  # [requests, m], from 1 on
    is_node: NDArray[np.bool_]  # [requests, m], False for padding
    path: NDArray[np.int64]  # [requests, levels], numbers of the accepted nodes from the root on, then -1
