"""Keys of the random numbers. A draw depends only on its position and its key, which is made of (seed, choice, stream).

So a seeded request gives the same text alone, in a batch, after a preemption, and with speculation on or off. The
generator and the noise are in `ops.sampling.gumbel`.
"""

from __future__ import annotations

import math
import struct

from eagle_server.ops.sampling.gumbel import FIRST, GAMMA, SECOND

_MASK, _SIGN = (1 << 64) - 1, 1 << 63
_FLOAT32 = struct.Struct("f")
TARGET_STREAM = 0  # the target's draws; drafters that sample use other streams


def request_key(seed: int, choice: int, stream: int = TARGET_STREAM) -> int:
    """The 64-bit key of one request's stream, as a signed integer."""
    key = _mix_host(_mix_host(seed & _MASK) ^ ((choice << 8) | stream))
    return (key ^ _SIGN) - _SIGN  # as a signed integer


class TokenNoise:
    """The Gumbel noise of single tokens under one key at one position, on the host: `gumbel` of ops/sampling/gumbel.py.

    The hash and the uniform number are the same bits. The logarithms are computed in float64.
    """

    def __init__(self, key: int, position: int) -> None:
        self._row = _final_mix((key & _MASK) ^ _final_mix(position * GAMMA & _MASK))

    def __call__(self, token: int) -> float:
        bits = _final_mix((self._row + (token + 1) * GAMMA) & _MASK) >> 11
        uniform = min(max(_as_float32(bits) * 2.0**-53, 2.0**-60), 1 - 2.0**-24)
        return -math.log(-math.log1p(-uniform))


def _as_float32(x: int) -> float:
    rounded: float = _FLOAT32.unpack(_FLOAT32.pack(x))[0]
    return rounded


def _mix_host(x: int) -> int:
    return _final_mix((x + GAMMA) & _MASK)


def _final_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * FIRST) & _MASK
    x = ((x ^ (x >> 27)) * SECOND) & _MASK
    return x ^ (x >> 31)
