"""Even pacing: sends the tokens of a cycle one by one, spread over the expected time until the next cycle ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from msgspec.structs import replace

from eagle_server.request import TokenDelta

WEIGHT = 0.3  # of the newest cycle in the moving average of the cycle time
LONGEST_CYCLE = 0.5  # seconds; longer cycles count as this long


async def paced(deltas: AsyncIterator[TokenDelta]) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of one request, one token each. When the next cycle's delta arrives, the rest is sent at once."""
    clock = asyncio.get_running_loop().time
    cycle: float | None = None  # seconds
    following = _next(deltas)
    arrived = 0.0
    try:
        while True:
            try:
                delta = await following
            except StopAsyncIteration:
                return
            now = clock()
            if arrived:
                took = min(now - arrived, LONGEST_CYCLE)
                cycle = took if cycle is None else cycle + WEIGHT * (took - cycle)
            arrived = now
            following = _next(deltas)
            steps = list(single(delta))
            for number, step in enumerate(steps, start=1):
                yield step
                due = arrived + (cycle or 0.0) * number / len(steps)
                if number < len(steps) and not following.done() and due > clock():
                    await asyncio.wait({following}, timeout=due - clock())
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def single(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Split a delta into deltas of one token each.

    The first one has the prompt's scores and the tree, the last one the finish reason.
    """
    last = len(delta.token_ids) - 1
    if last < 1:
        yield delta
        return
    for position, token_id in enumerate(delta.token_ids):
        ends = position == last
        yield replace(
            delta,
            token_ids=[token_id],
            logprobs=None if delta.logprobs is None else [delta.logprobs[position]],
            prompt_logprobs=delta.prompt_logprobs if position == 0 else None,
            finish_reason=delta.finish_reason if ends else None,
            error=delta.error if ends else None,
            spec=delta.spec if ends else None,
            tree=delta.tree if position == 0 else None,
        )


def _next(deltas: AsyncIterator[TokenDelta]) -> asyncio.Future[TokenDelta]:
    return asyncio.ensure_future(anext(deltas))
