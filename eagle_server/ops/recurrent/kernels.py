"""The gated delta rule over trees on a GPU: a verify forward of one layer, and the accepted paths of all layers.

The formulas, and the torch twins `recurrent_nodes` and `after_path`, are in `ops.recurrent.nodes`. A program of the
first kernel computes a block of value columns of one head and request. It reads that block of S_0 once and holds no
state: with P the products of strict ancestors' keys, rates and decays, and W those of ancestors' keys and queries,

    u = given - P u,   given = b (v - e^G S_0^T k),   o = e^G S_0^T q + W u

P has no entries but at strict ancestors, so d rounds of the first equation, from u = given, are exact at depth d: the
largest depth of the trees is all that a launch needs to know about them. The convolution is computed by every block
again, because its inputs are few. Products are three of tf32 each (tf32x3), which are about as exact as float32's.

A program of the second kernel reads a block of a state, takes the path's steps S = e^g S + k u^T, and writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_server.ops.device import on_gpu
from eagle_server.ops.recurrent.nodes import NORM_EPS, RecurrentLayer, RecurrentShape
from eagle_server.ops.triton_support import blocks, constant, jit, power_of_two, tl

LARGEST_TREE = 64  # nodes: a program holds a square of them in registers
_LARGEST_KEY = 256
_FEW = 256  # up to this many programs, each computes half as many value columns
_COLUMNS = 64  # value columns of a program
_KEYS = 16  # numbers of keys that a program holds at once
_EPS = constant(NORM_EPS)
_LINEAR = constant(20.0)  # softplus(x) is x from here on, as in torch


class Trees(NamedTuple):
    """The trees of a forward, D nodes each, contiguous. The first nodes of each have rows."""

    parents: Tensor  # int64 [bs, D], -1 at the root
    mask: Tensor  # bool [bs, D, D], True at a node's ancestors and itself
    counts: Tensor  # int64 [bs], nodes that have rows
    first: Tensor  # int64 [bs], the root's row
    steps: int  # the depth of the deepest node, or more

    @classmethod
    def of(cls, parents: Tensor, mask: Tensor, counts: Tensor | None, steps: int) -> Trees:
        """counts: None: all nodes have rows."""
        if counts is None:
            counts = torch.full_like(parents[:, 0], parents.shape[1])
        return cls(parents.contiguous(), mask.contiguous(), counts, counts.cumsum(0) - counts, steps)


def computed(states: Tensor, shape: RecurrentShape, nodes: int = 1) -> bool:
    """Whether the kernels compute trees of so many nodes over these states: those of the delta rule."""
    fits = shape.rule == "delta" and nodes <= LARGEST_TREE and shape.key_dim <= _LARGEST_KEY
    return on_gpu(states) and states.dtype == torch.float32 and fits


def delta_trees(
    x: Tensor, gates: Tensor, layer: RecurrentLayer, trees: Trees, requests: Tensor, parts: Sequence[Tensor]
) -> Tensor:
    """The outputs of the trees' rows, float32 [T, value_heads, V]. The nodes are stored, the states stay.

    Nothing is read from the device, and padding of trees and batches is computed, as any grid of a captured graph.

    Args:
        x: [T, channels], inputs of the convolution, the rows of one tree after the other.
        gates: [T, 2 * value_heads], b before the sigmoid, then a.
        requests: int64 [bs], rows of the pool.
        parts: states, rings, inputs, keys, updates and decays of a `StatePool`, contiguous.
    """
    shape, (bs, size) = layer.shape, trees.parents.shape
    states, rings, *nodes = (part[layer.index] for part in parts)
    out = torch.empty(len(x), shape.value_heads, shape.value_dim, device=x.device)
    columns = min(_COLUMNS, power_of_two(shape.value_dim, 16))
    if columns == _COLUMNS and bs * shape.value_heads * blocks(shape.value_dim, columns) <= _FEW:
        columns //= 2
    square = power_of_two(size, 16)
    _tree_kernel[(blocks(shape.value_dim, columns), shape.value_heads, bs)](
        *(x, gates, trees.parents, trees.mask.view(torch.uint8), trees.counts, trees.first),
        *(requests.contiguous(), layer.conv, layer.a_log, layer.dt_bias, states, rings, *nodes, out),
        *(x.stride(0), gates.stride(0), size, trees.steps, nodes[0].shape[1]),
        *(shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.key_dim**-0.5),
        KERNEL=shape.kernel,
        NODES=square,
        KEYS=min(_KEYS, power_of_two(shape.key_dim, 16)),
        VALUE=columns,
        num_warps=4 if square <= 16 else 8,  # noqa: PLR2004
    )
    return out


def keep_paths(path: Tensor, requests: Tensor, shape: RecurrentShape, parts: Sequence[Tensor]) -> None:
    """Move the states of these rows, int64 [bs], along their paths of stored nodes, in all layers.

    path: int64 [bs, w], -1 after its end. parts: as `delta_trees` has them. Rows that are named twice are padding.
    """
    states, rings, inputs, *nodes = parts
    columns = min(_COLUMNS, power_of_two(shape.value_dim, 16))
    _keep_kernel[(blocks(shape.value_dim, columns), shape.value_heads, len(states) * len(path))](
        *(path.contiguous(), requests.contiguous(), states, rings, inputs, *nodes),
        *(*path.shape, states.shape[1], inputs.shape[1], inputs.shape[2]),
        *(shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim),
        KERNEL=shape.kernel,
        KEY=power_of_two(shape.key_dim, 16),
        VALUE=columns,
        num_warps=4,
    )


@jit
def _mixed(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, x_row, ring, own, parents, conv, channels, node, is_node, channel, is_channel, stored, KERNEL: tl.constexpr
):
    """silu(convolution) of some channels of one tree, [nodes, channels]. The inputs of some are stored."""
    total = tl.zeros([node.shape[0], channel.shape[0]], tl.float32)
    place = node.to(tl.int64)  # of the tap; below 0 it is in the ring, the end of which stands before the root
    for back in tl.static_range(KERNEL):
        in_tree, in_ring = is_node & (place >= 0), is_node & (place < 0)
        tap = tl.load(
            x + place[:, None] * x_row + channel[None], mask=in_tree[:, None] & is_channel[None], other=0.0
        ).to(ring.dtype.element_ty)
        if back == 0:
            tl.store(
                own + place[:, None] * channels + channel[None],
                tap,
                mask=in_tree[:, None] & stored[None],
            )
        past = tl.load(
            ring + (place + (KERNEL - 1))[:, None] * channels + channel[None],
            mask=in_ring[:, None] & is_channel[None],
            other=0.0,
        )
        weight = tl.load(conv + channel * KERNEL + (KERNEL - 1 - back), mask=is_channel, other=0.0)
        total += (tap.to(tl.float32) + past.to(tl.float32)) * weight.to(tl.float32)[None]
        place = tl.where(in_tree, tl.load(parents + place, mask=in_tree, other=0), place - 1)
    return total * tl.sigmoid(total)


@jit(varying=("parents", "mask", "counts", "first", "requests", "size", "steps"))
def _tree_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915, PLR0917
    x,
    gates,
    parents,
    mask,
    counts,
    first,
    requests,
    conv,
    a_log,
    dt_bias,
    states,
    rings,
    inputs,
    keys,
    updates,
    decays,
    out,
    x_row,
    gates_row,
    size,
    steps,
    room,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    scale,
    KERNEL: tl.constexpr,
    NODES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUE: tl.constexpr,
):
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    shared = value_heads // key_heads
    key_head = head // shared
    column, node = tl.program_id(0) * VALUE + tl.arange(0, VALUE), tl.arange(0, NODES)
    count, start = tl.load(counts + request), tl.load(first + request)
    row = tl.load(requests + request)
    is_node, is_column = node < count, column < value_dim
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    stores_keys = (tl.program_id(0) == 0) & (head % shared == 0)

    rows, ring, own = x + start * x_row, rings + row * (KERNEL - 1) * channels, inputs + row * room * channels
    links, place = parents + request * size, row * room + node
    stored = keys + (place * key_heads + key_head)[:, None] * key_dim
    entry = states + (row * value_heads + head) * key_dim * value_dim
    # Sums over the numbers of a key, of which no program holds all: with q and k as they come out of the convolution.
    qq, kk = tl.zeros([NODES], tl.float32), tl.zeros([NODES], tl.float32)
    k_k, q_k = tl.zeros([NODES, NODES], tl.float32), tl.zeros([NODES, NODES], tl.float32)
    k_s, q_s = tl.zeros([NODES, VALUE], tl.float32), tl.zeros([NODES, VALUE], tl.float32)
    for first_key in range(0, key_dim, KEYS):
        key = first_key + tl.arange(0, KEYS)
        is_key = key < key_dim
        channel, stores = key_head * key_dim + key, is_key & stores_keys
        q = _mixed(rows, x_row, ring, own, links, conv, channels, node, is_node, channel, is_key, stores, KERNEL)
        channel += key_heads * key_dim
        k = _mixed(rows, x_row, ring, own, links, conv, channels, node, is_node, channel, is_key, stores, KERNEL)
        tl.store(stored + key[None], k, mask=is_node[:, None] & stores[None])
        state = tl.load(
            entry + key[:, None] * value_dim + column[None], mask=is_key[:, None] & is_column[None], other=0.0
        )
        qq += tl.sum(q * q, axis=1)
        kk += tl.sum(k * k, axis=1)
        k_k += tl.dot(k, tl.trans(k), input_precision="tf32x3")
        q_k += tl.dot(q, tl.trans(k), input_precision="tf32x3")
        k_s += tl.dot(k, state, input_precision="tf32x3")
        q_s += tl.dot(q, state, input_precision="tf32x3")
    q_norm, k_norm = tl.rsqrt(qq + _EPS) * scale, tl.rsqrt(kk + _EPS)
    if stores_keys:
        tl.debug_barrier()  # other threads may have stored what a thread reads
        for first_key in range(0, key_dim, KEYS):
            key = first_key + tl.arange(0, KEYS)
            is_stored = is_node[:, None] & (key < key_dim)[None]
            k = tl.load(stored + key[None], mask=is_stored, other=0.0)
            tl.store(stored + key[None], k * k_norm[:, None], mask=is_stored)

    gate = gates + (start + node) * gates_row + head
    rate = tl.sigmoid(tl.load(gate, mask=is_node, other=0.0).to(tl.float32))
    raw = tl.load(gate + value_heads, mask=is_node, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    grown = tl.where(raw > _LINEAR, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, _LINEAR))))
    decay = tl.where(is_node, -tl.exp(tl.load(a_log + head)) * grown, 0.0)
    tl.store(decays + place * value_heads + head, decay, mask=is_node & (tl.program_id(0) == 0))

    both = is_node[:, None] & is_node[None]
    seen = tl.load(mask + request * size * size + node[:, None] * size + node[None], mask=both, other=0) != 0
    total = tl.sum(tl.where(seen, decay[None], 0.0), axis=1)  # G
    between = tl.exp(tl.where(seen, total[:, None] - total[None], float("-inf")))
    strict = seen & (node[:, None] != node[None])
    products = k_k * tl.where(strict, between, 0.0) * (rate * k_norm)[:, None] * k_norm[None]
    scores = q_k * between * q_norm[:, None] * k_norm[None]
    channel = 2 * key_heads * key_dim + head * value_dim + column
    v = _mixed(rows, x_row, ring, own, links, conv, channels, node, is_node, channel, is_column, is_column, KERNEL)
    left = tl.exp(total)
    given = rate[:, None] * (v - (left * k_norm)[:, None] * k_s)
    update = given
    for _ in range(steps):
        update = given - tl.dot(products, update, input_precision="tf32x3")
    mixed = (left * q_norm)[:, None] * q_s + tl.dot(scores, update, input_precision="tf32x3")
    is_value = is_node[:, None] & is_column[None]
    tl.store(updates + (place * value_heads + head)[:, None] * value_dim + column[None], update, mask=is_value)
    tl.store(out + ((start + node) * value_heads + head)[:, None] * value_dim + column[None], mixed, mask=is_value)


@jit
def _move_ring(ring, own, path, length, channels, channel, is_channel, KERNEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last inputs of (ring, inputs of the path's nodes), for some channels. Each thread moves its own ones."""
    for i in tl.static_range(KERNEL - 1):
        place = length + i
        in_ring = place < KERNEL - 1
        node = tl.load(path + place - (KERNEL - 1), mask=place >= KERNEL - 1, other=0)
        old = tl.load(ring + place * channels + channel, mask=is_channel & in_ring, other=0.0)
        new = tl.load(own + node * channels + channel, mask=is_channel & (place >= KERNEL - 1), other=0.0)
        tl.store(ring + i * channels + channel, tl.where(in_ring, old, new), mask=is_channel)


@jit(varying=("path", "requests", "bs", "width"))
def _keep_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    path,
    requests,
    states,
    rings,
    inputs,
    keys,
    updates,
    decays,
    bs,
    width,
    state_rows,
    node_rows,
    room,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    KERNEL: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    head, layer = tl.program_id(1), (tl.program_id(2) // bs).to(tl.int64)
    steps, row = path + tl.program_id(2) % bs * width, tl.load(requests + tl.program_id(2) % bs)
    shared = value_heads // key_heads
    key_head = head // shared
    column, key = tl.program_id(0) * VALUE + tl.arange(0, VALUE), tl.arange(0, KEY)
    is_key, is_column = key < key_dim, column < value_dim
    state_row, node_row = layer * state_rows + row, layer * node_rows + row
    at = states + ((state_row * value_heads + head) * key_dim + key)[:, None] * value_dim + column[None]
    in_state = is_key[:, None] & is_column[None]
    state = tl.load(at, mask=in_state, other=0.0)
    length = 0
    for step in range(width):
        node = tl.load(steps + step)
        if node >= 0:
            place = node_row * room + node
            k = tl.load(keys + (place * key_heads + key_head) * key_dim + key, mask=is_key, other=0.0)
            u = tl.load(updates + (place * value_heads + head) * value_dim + column, mask=is_column, other=0.0)
            state = state * tl.exp(tl.load(decays + place * value_heads + head)) + k[:, None] * u[None]
            length += 1
    tl.store(at, state, mask=in_state)

    channels = 2 * key_heads * key_dim + value_heads * value_dim
    ring, own = rings + state_row * (KERNEL - 1) * channels, inputs + node_row * room * channels
    v_channel, q_channel = 2 * key_heads * key_dim + head * value_dim + column, key_head * key_dim + key
    moves_keys = is_key & (tl.program_id(0) == 0) & (head % shared == 0)
    _move_ring(ring, own, steps, length, channels, v_channel, is_column, KERNEL)
    _move_ring(ring, own, steps, length, channels, q_channel, moves_keys, KERNEL)
    _move_ring(ring, own, steps, length, channels, key_heads * key_dim + q_channel, moves_keys, KERNEL)
