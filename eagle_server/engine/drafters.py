"""From a loaded draft to a drafter: the one place that tells kinds of drafts apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eagle_server.cache.pool import KVPool, LatentPool
from eagle_server.engine.backends import Backends
from eagle_server.engine.pools import make_pool
from eagle_server.engine.shape import Shape
from eagle_server.models.draft import DraftHead
from eagle_server.worker.drafters.eagle import EagleDrafter
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.drafters.none import NoDrafter
from eagle_server.worker.graphs import Graphs

Draft = DraftHead  # what a drafter is made of; None: plain decoding


@dataclass(frozen=True)
class Workbench:
    """What drafters are made with."""

    shape: Shape
    slots: int
    device: torch.device
    backends: Backends
    graphs: Graphs


def make_drafter(draft: Draft | None, bench: Workbench) -> tuple[Drafter[Any], list[KVPool | LatentPool]]:
    """The drafter, and the KV pools that it brought."""
    if draft is None:
        return NoDrafter(), []
    shape = bench.shape
    pool = make_pool(draft.config, bench.slots, bench.device)
    drafter = EagleDrafter(
        draft,
        bench.backends.make(draft, pool, (shape.num_steps + 1, shape.topk), shape.draft_attention),
        num_steps=shape.num_steps,
        topk=shape.topk,
        draft_token_num=shape.draft_token_num,
        graphs=bench.graphs,
        beams=shape.backend == "flashinfer" and shape.draft_attention == "beams",
    )
    return drafter, [pool]
