"""The simulation: conversations arrive, a policy routes their turns, replicas answer. Events only, no time steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_tools.bench.replicas.conversations import Dialogue
from eagle_tools.bench.replicas.costs import ReplicaCosts
from eagle_tools.bench.replicas.replica import Replica, TurnRequest
from eagle_tools.bench.replicas.routing import Routing

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TurnTimes:
    """All turns, in the order in which they ended, and the cycles of all replicas."""

    arrived: Floats  # [turns], seconds
    first_token: Floats  # [turns]
    ended: Floats  # [turns]
    prompt_tokens: Floats  # [turns]
    cached_tokens: Floats  # [turns]
    answer_tokens: Floats  # [turns]
    tokens_per_cycle: float  # of a request that decodes

    def summary(self, begin: float, end: float) -> dict[str, float]:
        """Times in seconds of the turns that arrived in [begin, end), and tokens/s of the turns that ended in it."""
        counted = (self.arrived >= begin) & (self.arrived < end)
        if not counted.any():
            raise ValueError("no turn arrived in the time that counts: raise --seconds or --load")
        ended = (self.ended >= begin) & (self.ended < end)
        first, whole = (self.first_token - self.arrived)[counted], (self.ended - self.arrived)[counted]
        return {
            "turns": float(counted.sum()),
            "hit rate": float(self.cached_tokens[counted].sum() / self.prompt_tokens[counted].sum()),
            "TTFT p50": float(np.quantile(first, 0.5)),
            "TTFT p99": float(np.quantile(first, 0.99)),
            "latency p50": float(np.quantile(whole, 0.5)),
            "latency p99": float(np.quantile(whole, 0.99)),
            "tokens/s": float(self.answer_tokens[ended].sum() / (end - begin)),
            "tokens/cycle": self.tokens_per_cycle,
        }


def simulate(
    costs: ReplicaCosts,
    conversations: Sequence[Dialogue],
    replicas: int,
    routing: Routing,
    advance: Callable[[float], None] = lambda now: None,
) -> TurnTimes:
    """Run until every turn has ended. `advance` is told the time of every start of a conversation."""
    servers = [Replica(costs) for _ in range(replicas)]
    loads = np.zeros(replicas, np.int64)
    # (time, order, replica or -1, turn): a turn arrives, or the run of a replica ends, if it has not moved meanwhile
    events: list[tuple[float, int, int, TurnRequest | None]] = []
    done: list[TurnRequest] = []
    order = len(conversations)
    for number, conversation in enumerate(conversations):
        events.append((conversation.start, number, -1, _turn(number, conversation, 0, 0, conversation.start)))
    heapq.heapify(events)
    while events:
        now, _, place, request = heapq.heappop(events)
        order += 1
        if request is not None:
            if request.turn == 0:
                advance(now)
            place = routing.choose(request, loads)
            loads[place] += 1
            before = servers[place].end
            servers[place].add(request, now)
            if servers[place].end != before:
                heapq.heappush(events, (servers[place].end, order, place, None))
            continue
        if servers[place].end != now:
            continue
        for ended in servers[place].end_run():
            loads[place] -= 1
            done.append(ended)
            turns = ended.conversation.turns
            if ended.turn + 1 < len(turns):
                length = ended.prompt_tokens + ended.answer_tokens - ended.conversation.beginning_tokens
                arrives = now + turns[ended.turn + 1].think
                following = _turn(ended.number, ended.conversation, ended.turn + 1, length, arrives)
                order += 1
                heapq.heappush(events, (arrives, order, -1, following))
        if servers[place].end < np.inf:
            heapq.heappush(events, (servers[place].end, order, place, None))
    cycles = sum(server.request_cycles for server in servers)
    tokens = sum(server.decoded_tokens for server in servers)
    return TurnTimes(
        arrived=np.array([turn.arrived for turn in done]),
        first_token=np.array([turn.first_token for turn in done]),
        ended=np.array([turn.ended for turn in done]),
        prompt_tokens=np.array([turn.prompt_tokens for turn in done], float),
        cached_tokens=np.array([turn.cached_tokens for turn in done], float),
        answer_tokens=np.array([turn.answer_tokens for turn in done], float),
        tokens_per_cycle=tokens / cycles if cycles else 1.0,
    )


def _turn(number: int, conversation: Dialogue, turn: int, history: int, arrives: float) -> TurnRequest:
    """The request of a turn. `history`: tokens of the turns before it."""
    new_tokens, answer_tokens, _ = conversation.turns[turn]
    prompt = conversation.beginning_tokens + history + new_tokens
    return TurnRequest(number, conversation, turn, prompt, arrives, answer_tokens)
