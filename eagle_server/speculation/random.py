"""Keys of the random numbers. A draw depends only on its position and its key, which is made of (seed, choice, stream).

So a seeded request gives the same text alone, in a batch, after a preemption, and with speculation on or off. The
generator and the noise are in `ops.gumbel`.
"""

from __future__ import annotations

from eagle_server.ops.gumbel import FIRST, GAMMA, SECOND, signed

_MASK = (1 << 64) - 1
TARGET_STREAM = 0  # the target's draws; drafters that sample use other streams


def request_key(seed: int, choice: int, stream: int = TARGET_STREAM) -> int:
    """The 64-bit key of one request's stream, as a signed integer."""
    return signed(_mix_host(_mix_host(seed & _MASK) ^ ((choice << 8) | stream)))


def _mix_host(x: int) -> int:
    x = (x + GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * FIRST) & _MASK
    x = ((x ^ (x >> 27)) * SECOND) & _MASK
    return x ^ (x >> 31)
