"""From a loaded draft model to a drafter, by the table of algorithms."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from eagle_server.algorithms import ALGORITHMS, Algorithm
from eagle_server.cache.pool import KVPool, LatentPool
from eagle_server.engine.assembly.backends import Backends
from eagle_server.engine.assembly.pools import make_pool
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.drafters.interface import Drafter, DrafterSetup
from eagle_server.worker.drafters.mixture import MixtureDrafter
from eagle_server.worker.drafters.ngram.drafter import NgramDrafter, NgramTries
from eagle_server.worker.drafters.none import NoDrafter
from eagle_server.worker.graphs import Graphs


def lookahead_slots(row: Algorithm | None, tree: TreeConfig) -> int:
    """KV slots after the text of a decoding request: as many as its drafter writes, and one per verified node.

    At least two: `Worker._run_ahead` writes position seq_len + 1 before the scheduler allocates it. `row`: of the draft
    model; None: there is none.
    """
    drafting = 0 if row is None else resolve_name(row.lookahead)(tree)
    return max(2, drafting, tree.nodes)


def make_drafter(
    model: DraftModel | None,
    config: EngineConfig,
    backends: Backends,
    graphs: Graphs,
    target_pool: KVPool | LatentPool,
) -> tuple[Drafter[Any], list[KVPool | LatentPool]]:
    """The drafter, and the KV pools that its model writes.

    Raises:
        ValueError: the model cannot draft the tree of `config`.
    """
    tree = config.tree
    if model is None:
        return (NgramDrafter(_tries(config)) if tree.ngram_steps else NoDrafter()), []
    pools = [] if model.kv is None else [make_pool(model.kv, config.kv_slots, backends.device)]
    row = ALGORITHMS[model.algorithm]
    read, rows_each = (target_pool, tree.topk) if model.reads_target_kv else (pools[0] if pools else None, 1)
    setup = DrafterSetup(
        tree,
        backends.device,
        graphs,
        config.graph_sizes,
        attention=lambda rows: backends.make(model, read, rows, config.draft_attention, rows_each),
        per_node=config.backend == "flashinfer" and config.draft_attention == "per_node",
        requests=config.max_running_requests + 1,
    )
    name = row.drafter if row.static_drafter is None or not tree.choices else row.static_drafter
    drafter: Drafter[Any] = resolve_name(name)(model, setup)
    return (MixtureDrafter(drafter, _tries(config), setup) if tree.ngram_steps else drafter), pools


def _tries(config: EngineConfig) -> NgramTries:
    return NgramTries(config.tree.ngram_steps, config.tree.nodes, coupling=config.coupling)
