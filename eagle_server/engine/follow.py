"""The engine of a rank above 0: a KV pool, an attention backend and the target's forwards, without requests."""

from __future__ import annotations

from typing import Any, get_args

import torch

from eagle_server.cache.page_table import PageTable
from eagle_server.engine.build.backends import Backends
from eagle_server.engine.build.pools import make_pool
from eagle_server.engine.engine_config import Backend, EngineConfig
from eagle_server.models.ranks import RankGroup
from eagle_server.models.targets.interface import Target
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.follower import Follower
from eagle_server.worker.rank_messages import RankMessage
from eagle_server.worker.verifier import Verifier

_BACKENDS: tuple[Backend, ...] = get_args(Backend)


def send_setup(ranks: RankGroup, config: EngineConfig) -> None:
    """Rank 0 resolved the configuration; its sizes hold for all ranks."""
    sizes = (config.context_length, config.max_total_tokens, config.page_size, config.max_running_requests)
    numbers = [*sizes, config.tree.num_lookahead_slots, _BACKENDS.index(config.backend)]
    ranks.send(RankMessage.SETUP, numbers)


def assemble_follower(target: Target, ranks: RankGroup, *, flashinfer: Any = None) -> Follower:
    """A follower over this rank's share of the target. Waits for rank 0's `send_setup`. `flashinfer`: for tests."""
    kind, numbers, _ = ranks.receive()
    assert kind == RankMessage.SETUP, "rank 0 sends the sizes first"
    context, tokens, page_size, running, lookahead, backend = numbers
    tree = TreeConfig(num_draft_tokens=lookahead)  # all that a follower needs of it
    config = EngineConfig(context, tokens, tree, page_size, running, backend=_BACKENDS[backend])
    device = target.embed.device
    pool = make_pool(target.config, config.kv_slots, device)
    attention = Backends(config, device, flashinfer).make(target, pool, (), config.verify_attention)
    table = PageTable(running, context + lookahead, page_size)
    return Follower(ranks, Verifier(target, attention, pool), torch.from_numpy(table.slots).to(device))
