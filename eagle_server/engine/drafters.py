"""From a loaded draft model to a drafter: the one place that tells kinds of drafts apart."""

from __future__ import annotations

from typing import Any

from eagle_server.cache.pool import KVPool, LatentPool
from eagle_server.engine.backends import Backends
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.engine.pools import DraftModel, make_pool
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


def make_drafter(
    model: DraftModel | None, config: EngineConfig, backends: Backends, graphs: Graphs
) -> tuple[Drafter[Any], list[KVPool | LatentPool]]:
    """The drafter, and the KV pools that its model writes."""
    tree, device = config.tree, backends.device
    if model is None:
        return (NgramDrafter(_tries(config)) if tree.ngram_depth else NoDrafter()), []
    drafter: ModelDrafter[Any]
    pools: list[KVPool | LatentPool] = []
    if isinstance(model, MedusaHeads):
        sizes = config.graph_sizes
        drafter = MedusaDrafter(model, tree.choices, device=device, graphs=graphs, graph_sizes=sizes)
    elif isinstance(model, RedrafterHead):
        drafter = _redrafter(model, config, graphs)
    else:
        pools = [make_pool(model.config, config.kv_slots, device)]
        drafter = _level_drafter(model, pools[0], config, backends, graphs)
    if tree.ngram_depth:
        sizes = config.graph_sizes
        return MixtureDrafter(drafter, _tries(config), device=device, graphs=graphs, graph_sizes=sizes), pools
    return drafter, pools


def _tries(config: EngineConfig) -> NgramTries:
    tree = config.tree
    shared = SharedTexts(tree.ngram_share_tokens, tree.ngram_depth) if tree.ngram_share_tokens else None
    return NgramTries(tree.ngram_depth, tree.num_draft_tokens, shared, coupling=config.coupling)


def _level_drafter(
    model: DraftHead | DraftLM, pool: KVPool | LatentPool, config: EngineConfig, backends: Backends, graphs: Graphs
) -> ModelDrafter[Any]:
    """A drafter whose model runs once per level of the tree."""
    tree = config.tree
    if tree.choices:
        static = static_tree(tree.choices, backends.device)
        attention = backends.make(model, pool, {tree.num_steps + 1, *static.rows}, config.draft_attention)
        return StaticEagleDrafter(model, attention, static, graphs)
    kind = StandaloneDrafter if isinstance(model, DraftLM) else EagleDrafter
    return kind(
        model,
        backends.make(model, pool, (tree.depth + 1, tree.topk), config.draft_attention),
        num_steps=tree.num_steps,
        topk=tree.topk,
        num_draft_tokens=tree.num_draft_tokens,
        graphs=graphs,
        per_node=config.backend == "flashinfer" and config.draft_attention == "per_node",
    )


def _redrafter(head: RedrafterHead, config: EngineConfig, graphs: Graphs) -> RedrafterDrafter:
    tree = config.tree
    most = tree.num_steps * tree.topk + 1
    if tree.num_draft_tokens > most and not tree.ngram_depth:
        raise ValueError(
            f"--speculative-num-draft-tokens {tree.num_draft_tokens}: {tree.topk} beams of {tree.num_steps} tokens "
            f"have at most {most} nodes, the root included"
        )
    return RedrafterDrafter(
        head,
        num_steps=tree.num_steps,
        beam_width=tree.topk,
        num_draft_tokens=min(tree.num_draft_tokens, most),
        graphs=graphs,
        graph_sizes=config.graph_sizes,
    )
