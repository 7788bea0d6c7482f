"""From a loaded draft to a drafter: the one place that tells kinds of drafts apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eagle_server.cache.pool import KVPool, LatentPool
from eagle_server.engine.backends import Backends
from eagle_server.engine.pools import make_pool
from eagle_server.engine.shape import EngineConfig
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.models.drafts.redrafter import RedrafterHead
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.speculation.static_tree import static_tree
from eagle_server.worker.drafters.eagle import EagleDrafter
from eagle_server.worker.drafters.interface import Drafter, ModelDrafter
from eagle_server.worker.drafters.medusa import MedusaDrafter
from eagle_server.worker.drafters.mixture import MixtureDrafter
from eagle_server.worker.drafters.ngram.drafter import NgramDrafter, NgramTries
from eagle_server.worker.drafters.ngram.shared_texts import SharedTexts
from eagle_server.worker.drafters.none import NoDrafter
from eagle_server.worker.drafters.redrafter import RedrafterDrafter
from eagle_server.worker.drafters.standalone import StandaloneDrafter
from eagle_server.worker.drafters.static_eagle import StaticEagleDrafter
from eagle_server.worker.graphs import Graphs

Draft = DraftHead | DraftLM | MedusaHeads | RedrafterHead  # what a drafter is made of; None: plain decoding


@dataclass(frozen=True)
class Workbench:
    """What drafters are made with."""

    shape: EngineConfig
    slots: int
    device: torch.device
    backends: Backends
    graphs: Graphs


def kv_config(draft: Draft) -> ModelConfig | None:
    """The shape of the KV pool that a draft writes, None if it writes none."""
    return None if isinstance(draft, MedusaHeads | RedrafterHead) else draft.config


def make_drafter(draft: Draft | None, bench: Workbench) -> tuple[Drafter[Any], list[KVPool | LatentPool]]:
    """The drafter, and the KV pools that it brought."""
    shape = bench.shape
    if draft is None:
        return (NgramDrafter(_tries(shape)) if shape.ngram_depth else NoDrafter()), []
    model, pools = _model_drafter(draft, bench)
    if not shape.ngram_depth:
        return model, pools
    device, graphs = bench.device, bench.graphs
    return MixtureDrafter(model, _tries(shape), device=device, graphs=graphs, graph_sizes=shape.graph_sizes), pools


def _tries(shape: EngineConfig) -> NgramTries:
    shared = SharedTexts(shape.ngram_share_tokens, shape.ngram_depth) if shape.ngram_share_tokens else None
    return NgramTries(shape.ngram_depth, shape.draft_token_num - 1, shared)


def _model_drafter(draft: Draft, bench: Workbench) -> tuple[ModelDrafter[Any], list[KVPool | LatentPool]]:
    shape = bench.shape
    if isinstance(draft, RedrafterHead):
        return _redrafter(draft, bench), []
    if isinstance(draft, MedusaHeads):
        return _medusa(draft, bench), []
    pool = make_pool(draft.config, bench.slots, bench.device)
    if shape.choices:
        tree = static_tree(shape.choices, bench.device)
        attention = bench.backends.make(draft, pool, {shape.num_steps + 1, *tree.rows}, shape.draft_attention)
        return StaticEagleDrafter(draft, attention, tree, bench.graphs), [pool]
    kind = StandaloneDrafter if isinstance(draft, DraftLM) else EagleDrafter
    drafter = kind(
        draft,
        bench.backends.make(
            draft, pool, (max(shape.num_steps, shape.ngram_depth) + 1, shape.topk), shape.draft_attention
        ),
        num_steps=shape.num_steps,
        topk=shape.topk,
        draft_token_num=shape.draft_token_num,
        graphs=bench.graphs,
        beams=shape.backend == "flashinfer" and shape.draft_attention == "beams",
    )
    return drafter, [pool]


def _medusa(heads: MedusaHeads, bench: Workbench) -> MedusaDrafter:
    shape = bench.shape
    return MedusaDrafter(heads, shape.choices, device=bench.device, graphs=bench.graphs, graph_sizes=shape.graph_sizes)


def _redrafter(head: RedrafterHead, bench: Workbench) -> RedrafterDrafter:
    shape = bench.shape
    most = shape.num_steps * shape.topk + 1
    if shape.draft_token_num > most and not shape.ngram_depth:
        raise ValueError(
            f"--speculative-num-draft-tokens {shape.draft_token_num}: {shape.topk} beams of {shape.num_steps} tokens "
            f"have at most {most} nodes, the root included"
        )
    return RedrafterDrafter(
        head,
        num_steps=shape.num_steps,
        beam_width=shape.topk,
        draft_token_num=min(shape.draft_token_num, most),
        graphs=bench.graphs,
        graph_sizes=shape.graph_sizes,
    )
