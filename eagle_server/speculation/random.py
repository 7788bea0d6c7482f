"""Keys of the random numbers: a draw depends on (seed, choice, stream) by its key, its position, and nothing else.

So a seeded request gives the same text alone, in a batch, after a preemption and with speculation on or off.
The noise itself, and the generator, are in `ops.gumbel`.
"""

from __future__ import annotations

from eagle_server.ops.gumbel import FIRST, GAMMA, SECOND, signed

_MASK = (1 << 64) - 1
TARGET_STREAM = 0  # the target's own draws; drafters that sample take other streams


def request_key(seed: int, choice: int, stream: int = TARGET_STREAM) -> int:
    """The 64-bit key of one request's stream, as a signed integer."""
    return signed(_mix_host(_mix_host(seed & _MASK) ^ ((choice << 8) | stream)))


def _mix_host(x: int) -> int:
    x = (x + GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * FIRST) & _MASK
    x = ((x ^ (x >> 27)) * SECOND) & _MASK
    return x ^ (x >> 31)
