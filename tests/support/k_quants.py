"""Rounds arrays to Q4_K, Q5_K and Q6_K, which the package gguf only reads. llama.cpp rounds them better."""

from __future__ import annotations

from typing import Any

import numpy as np

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
_SUPER = 256  # inputs of a block
Array = np.ndarray[Any, Any]


def k_quantized(array: Array, kind: str) -> Array:
    """float32 [..., in] -> the blocks, uint8 [..., bytes]."""
    blocks = array.reshape(-1, _SUPER)
    data = _q6_k(blocks) if kind == "Q6_K" else _q45_k(blocks, bits=int(kind[1]))
    return data.reshape(*array.shape[:-1], -1)


def _factors(values: Array, most: int) -> tuple[Array, Array]:
    """values [blocks, groups] as a float16 for each block, float32 [blocks, 1], times integers up to `most`."""
    d = (np.abs(values).max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return d, np.clip(np.rint(np.divide(values, d, out=np.zeros_like(values), where=d > 0)), -most - 1, most)


def _codes(groups: Array, scales: Array, lows: Array) -> Array:
    scales, lows = scales[..., None], lows[..., None]
    return np.rint(np.divide(groups - lows, scales, out=np.zeros_like(groups), where=scales != 0))


def _bytes(d: Array) -> Array:
    return np.ascontiguousarray(d.astype(np.float16)).view(np.uint8)


def _q6_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 16, 16)
    d, factors = _factors(np.abs(groups).max(axis=2) / 31, 127)
    codes = (np.clip(_codes(groups, d * factors, np.zeros_like(factors)), -32, 31) + 32).astype(np.uint8)
    halves = codes.reshape(-1, 2, 4, 32)  # halves of 128 inputs, quarters of those
    lower = (halves & 15)[:, :, :2] | (halves & 15)[:, :, 2:] << 4
    upper = sum((halves[:, :, quarter] >> 4) << 2 * quarter for quarter in range(4))
    rows = len(blocks)
    parts = (lower.reshape(rows, -1), np.asarray(upper).reshape(rows, -1), factors.astype(np.int8).view(np.uint8))
    return np.concatenate([*parts, _bytes(d)], axis=1)


def _q45_k(blocks: Array, bits: int) -> Array:
    groups, most = blocks.reshape(-1, 8, 32), (1 << bits) - 1
    least = np.minimum(groups.min(axis=2), 0)
    d, factors = _factors((groups.max(axis=2) - least) / most, 63)
    dmin, low_factors = _factors(-least, 63)
    codes = np.clip(_codes(groups, d * factors, -dmin * low_factors), 0, most).astype(np.uint8)
    scales, lows = factors.astype(np.uint8), low_factors.astype(np.uint8)
    packed = np.concatenate(
        [
            scales[:, :4] & 63 | (scales[:, 4:] >> 4) << 6,
            lows[:, :4] & 63 | (lows[:, 4:] >> 4) << 6,
            scales[:, 4:] & 15 | (lows[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    upper = [np.asarray(sum((codes[:, group] >> 4) << group for group in range(8)))] if bits == 5 else []
    pairs = codes.reshape(-1, 4, 2, 32) & 15
    lower = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(blocks), -1)
    return np.concatenate([_bytes(d), _bytes(dmin), packed, *upper, lower], axis=1)
