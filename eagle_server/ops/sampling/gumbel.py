"""Counter-based Gumbel noise: a value depends only on (key, position, token).

The generator is SplitMix64 (Steele, Lea, Flood 2014), used as a hash of key + counter. The hash and the conversion to
float32 are bit-identical on all devices. The two logarithms may differ in their last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.ops.dispatch import op
from eagle_server.ops.native.sampling import NativeScoring
from eagle_server.ops.triton_support import blocks, constant, jit, tl

GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(x: int) -> int:
    """The 64 bits of `x` as a signed integer."""
    return x - (1 << 64) if x >= 1 << 63 else x


_GAMMA, _FIRST, _SECOND = constant(signed(GAMMA)), constant(signed(FIRST)), constant(signed(SECOND))


@op
def gumbel(keys: Tensor, positions: Tensor, vocab_size: int, ids: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [n, vocab_size], for keys int64 [n] at positions int64 [n].

    Column i has the noise of token i, or of token ids[i] with `ids` int64 [vocab_size].
    """
    rows = _mix(keys ^ _mix(positions * signed(GAMMA)))
    counters = torch.arange(1, vocab_size + 1, device=keys.device) if ids is None else ids + 1
    bits = _mix(rows[:, None] + counters * signed(GAMMA))
    # 53 bits keep the relative precision of a float32 near 0. The largest Gumbel values come from there.
    uniform = _shift(bits, 11).to(torch.float32).mul_(2.0**-53).clamp_(min=2.0**-60, max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@gumbel.on("native")
def _gumbel_native(keys: Tensor, positions: Tensor, vocab_size: int, ids: Tensor | None = None) -> Tensor:
    return NativeScoring(None, vocab_size, keys, positions, ids=ids).noise()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * signed(FIRST)
    x = (x ^ _shift(x, 27)) * signed(SECOND)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@gumbel.on("triton")
def _launch_gumbel(keys: Tensor, positions: Tensor, vocab_size: int, ids: Tensor | None = None) -> Tensor:
    out = torch.empty(len(keys), vocab_size, dtype=torch.float32, device=keys.device)
    block = 1024
    grid = (blocks(vocab_size, block), len(keys))
    ids = None if ids is None else ids.contiguous()
    _gumbel_kernel[grid](keys.contiguous(), positions.contiguous(), ids, out, vocab_size, BLOCK=block)
    return out


@jit(varying=("keys", "positions"))
def _gumbel_kernel(keys, positions, ids, out, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    token = column if ids is None else tl.load(ids + column, mask=inside, other=0)
    noise = gumbel_at(row_state(tl.load(keys + row), tl.load(positions + row)), token)
    tl.store(out + row * vocab_size + column, noise, mask=inside)


@jit
def row_state(key, position):  # type: ignore[no-untyped-def]
    """The hash of one row's key and position, int64."""
    return mix(key ^ mix(position * _GAMMA))


@jit
def gumbel_at(row, token):  # type: ignore[no-untyped-def]
    """Noise of `token` (a block of integers); `row` is the result of `row_state`."""
    bits = mix(row + (token.to(tl.int64) + 1) * _GAMMA)
    uniform = ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float32) * 1.1102230246251565e-16  # 2^-53
    uniform = tl.minimum(tl.maximum(uniform, 8.673617379884035e-19), 0.999999940395355224609375)  # 2^-60, 1 - 2^-24
    # log1p(-u) by log: the factor u / (1 - w) corrects the rounding of w = 1 - u (Goldberg 1991, theorem 4).
    w = 1.0 - uniform
    lost = 1.0 - w
    exact = -tl.log(w) * (uniform / tl.where(lost == 0.0, 1.0, lost))
    return -tl.log(tl.where(lost == 0.0, uniform, exact))


@jit
def mix(x):  # type: ignore[no-untyped-def]
    """SplitMix64's finalizer on int64; the masks make the shifts logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
