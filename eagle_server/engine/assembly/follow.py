"""The engine of a rank above 0: a KV pool, an attention backend and the target's forwards, without requests."""

from __future__ import annotations

from typing import Any, get_args

from eagle_server.cache.page_table import PageTable
from eagle_server.engine.assembly.backends import Backends
from eagle_server.engine.assembly.pools import make_pool, make_states
from eagle_server.engine.engine_config import Backend, EngineConfig
from eagle_server.models.ranks import RankGroup
from eagle_server.models.targets.interface import Target
from eagle_server.worker.follower import Follower
from eagle_server.worker.rank_messages import RankMessage
from eagle_server.worker.request_states import RequestStates
from eagle_server.worker.verifier import Verifier

_BACKENDS: tuple[Backend, ...] = get_args(Backend)


def send_setup(ranks: RankGroup, config: EngineConfig) -> None:
    """Send the sizes that rank 0 has resolved to all ranks."""
    sizes = (config.context_length, config.max_total_tokens, config.page_size, config.max_running_requests)
    trees = (config.num_lookahead_slots, config.tree.nodes)
    ranks.send(RankMessage.SETUP, [*sizes, *trees, config.checkpoints, _BACKENDS.index(config.backend)])


def assemble_follower(target: Target, ranks: RankGroup, *, flashinfer: Any = None) -> Follower:
    """A follower over this rank's share of the target. Waits for rank 0's `send_setup`. `flashinfer`: for tests."""
    kind, numbers, _ = ranks.receive()
    assert kind == RankMessage.SETUP, "rank 0 sends the sizes first"
    context, tokens, page_size, running, lookahead, nodes, checkpoints, backend = numbers
    config = EngineConfig(
        context,
        tokens,
        page_size=page_size,
        max_running_requests=running,
        backend=_BACKENDS[backend],
        num_lookahead_slots=lookahead,
    )
    device = target.embed.device
    pool = make_pool(target.config, config.kv_slots, device)
    attention = Backends(config, device, flashinfer).make(target, pool, (), config.verify_attention)
    table = PageTable(running, context + lookahead, page_size, device)
    states = make_states(target.config, running, nodes, device, checkpoints)
    verifier = Verifier(target, attention, pool, states=None if states is None else RequestStates(states))
    return Follower(ranks, verifier, table.tensor)
