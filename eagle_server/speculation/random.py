"""Counter-based random numbers: a draw depends on (seed, choice, position, stream) and on nothing else.

So a seeded request gives the same text alone, in a batch, after a preemption and with speculation on or off.
The generator is SplitMix64 (Steele, Lea, Flood 2014) run as a hash of key + counter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
TARGET_STREAM = 0  # the target's own draws; drafters that sample take other streams


def request_key(seed: int, choice: int, stream: int = TARGET_STREAM) -> int:
    """The 64-bit key of one request's stream, as a signed integer."""
    return _signed(_mix_host(_mix_host(seed & _MASK) ^ ((choice << 8) | stream)))


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [n, vocab_size], for keys int64 [n] at positions int64 [n]."""
    rows = _mix(keys ^ _mix(positions * _signed(_GAMMA)))
    tokens = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GAMMA)
    bits = _mix(rows[:, None] + tokens)
    # 53 bits to a float32 keep their relative precision near 0, which is where the largest Gumbel values come from.
    uniform = _shift(bits, 11).to(torch.float32).mul_(2.0**-53).clamp_(min=2.0**-60, max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift(x, 27)) * _signed(_SECOND)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_host(x: int) -> int:
    x = (x + _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
