"""Recurrent layers over trees of tokens: a short convolution, then a linear recurrence with one state per text.

Per value head, with state S [K, V] (S_0: of the text before the nodes), keys k, values v, log decays g <= 0, rates b:

    S_i = diag(e^{g_i}) S_parent + k_i u_i^T,   o_i = S_i^T q_i

    delta        u_i = b_i (v_i - (diag(e^{g_i}) S_parent)^T k_i)    the gated delta rule (Qwen3-Next, Qwen3.5)
    kda          the same, g has a number per key channel            Kimi Delta Attention (Kimi Linear)
    ssd          u_i = b_i v_i, and o_i has d v_i added              Mamba-2 (Granite 4, Bamba, Nemotron-H, Falcon-H1)
    convolution  no state: o_i = v_i                                 LFM2

A node keeps k, u and g, not S. With G_i the sum of log decays from the text to node i, and <x, y>_ij the sum over
channels c of x_c y_c e^{G_ic - G_jc}:

    u_i = b_i (v_i - S_0^T (e^{G_i} k_i) - sum over strict ancestors j of <k_i, k_j>_ij u_j)    delta, kda
    o_i = S_0^T (e^{G_i} q_i) + sum over ancestors and i of <q_i, k_j>_ij u_j
    S_i = diag(e^{G_i}) S_0 + sum over ancestors and i of (e^{G_i - G_j} k_j) u_j^T

This is the chunked form of these rules (arXiv 2412.06464, 2510.26692, 2405.21060) with the ancestor mask in place of
the causal one. So prompts (chains), plain steps (one node) and trees are one computation.

Inputs: q, k and v are slices of the convolution, after silu. q and k of delta and kda are normalized, and q is divided
by sqrt(K). With s = softplus(a + dt_bias), g = -e^{A_log} s; b = sigmoid of a gate, or s for ssd. A key head serves
value_heads / key_heads consecutive value heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # see `RecurrentShape.chunk`
NORM_EPS = 1e-6  # of the norms of q and k
_ROWS = 8  # whose factors by key channel are held at once: as many as rows * nodes * channels of each head

Rule = Literal["delta", "kda", "ssd", "convolution"]
RULES: tuple[Rule, ...] = ("delta", "kda", "ssd", "convolution")


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of a recurrence: heads and their dimensions, and the inputs that a convolution sees.

    A convolution alone has one key head of size 0, and its channels are one value head. steps: the smallest and the
    largest s.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    rule: Rule = "delta"
    steps: tuple[float, float] = (0.0, math.inf)

    @property
    def sections(self) -> tuple[int, int, int]:
        """Numbers of all heads in q, in k and in v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Inputs of the convolution: q, k and v of all heads."""
        return sum(self.sections)

    @property
    def solves(self) -> bool:
        """Whether u depends on the state, and so on the ancestors' u."""
        return self.rule in ("delta", "kda")

    @property
    def update_dim(self) -> int:
        """Numbers of u in a head."""
        return 0 if self.rule == "convolution" else self.value_dim

    @property
    def decays(self) -> int:
        """Numbers of g in a node."""
        of_head = {"delta": 1, "kda": self.key_dim, "ssd": 1, "convolution": 0}
        return self.value_heads * of_head[self.rule]

    @property
    def chunk(self) -> int:
        """Rows of a prompt that are computed at once. Each costs a product with each other row, for kda K of them."""
        return CHUNK // 4 if self.rule == "kda" else CHUNK

    @property
    def gates(self) -> int:
        """Inputs that do not pass the convolution: b before the sigmoid, then a."""
        return self.decays + (self.value_heads if self.solves else 0)


@dataclass(frozen=True)
class RecurrentLayer:
    """The weights of a layer's convolution and gates. `index`: its number among the recurrent layers."""

    index: int
    shape: RecurrentShape
    conv: Tensor  # [channels, kernel], the newest input last
    a_log: Tensor  # float32 [value_heads], [0] for a convolution
    dt_bias: Tensor  # float32 [decays]
    conv_bias: Tensor | None = None  # [channels]
    skip: Tensor | None = None  # d of ssd, float32 [value_heads]


@dataclass(frozen=True)
class RecurrentNodes:
    """What nodes leave behind, from which the state after any of them follows."""

    inputs: Tensor  # [n, D, channels], of the convolution
    keys: Tensor  # [n, D, key_heads, K], as all but `inputs` at least float32
    updates: Tensor  # u, [n, D, value_heads, update_dim]
    decays: Tensor  # g, [n, D, decays]


def recurrent_nodes(
    x: Tensor,
    gates: Tensor,
    layer: RecurrentLayer,
    state: Tensor,
    ring: Tensor,
    visible: Tensor | None = None,
    taps: Tensor | None = None,
) -> tuple[Tensor, RecurrentNodes]:
    """The outputs of n trees of D nodes, [n, D, value_heads, V], and what the nodes leave behind.

    Args:
        x: [n, D, channels], inputs of the convolution: q, k, v; for ssd v, k, q.
        gates: [n, D, gates], see `RecurrentShape.gates`.
        state: [n, value_heads, K, V], of the texts before the trees.
        ring: [n, kernel - 1, channels], the last inputs of these texts.
        visible: bool [n, D, D], True at ancestors and the node itself; parents have lower numbers. None: chains.
        taps: int64 [n, D, kernel], see `tree_taps`. None: chains.
    """
    shape, wide, heads = layer.shape, state.dtype, layer.shape.value_heads
    mixed = _convolved(x, ring, layer, taps).to(wide)
    if shape.rule == "convolution":
        nothing = mixed.new_zeros(*mixed.shape[:2], 1, 0)
        return mixed.unsqueeze(2), RecurrentNodes(x, nothing, nothing, nothing.flatten(2))
    q, k, v = _heads(F.silu(mixed), shape)
    steps = F.softplus(gates[..., -shape.decays :].to(wide) + layer.dt_bias.to(wide)).clamp(*shape.steps)
    decays = -layer.a_log.to(wide).exp()[:, None] * steps.unflatten(2, (heads, -1))  # [n, D, value_heads, 1 or K]
    rates = gates[..., :heads].to(wide).sigmoid() if shape.solves else steps
    out, updates = _chunk(q, k, v, rates, decays, state, visible, solves=shape.solves)
    if layer.skip is not None:
        out = out + layer.skip.to(wide)[:, None] * v
    return out, RecurrentNodes(x, k, updates, decays.flatten(2))


def _heads(mixed: Tensor, shape: RecurrentShape) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [n, D, key_heads, K] and v [n, D, value_heads, V]."""
    if shape.rule == "ssd":
        v, k, q = mixed.split_with_sizes(shape.sections[::-1], dim=2)
    else:
        q, k, v = mixed.split_with_sizes(shape.sections, dim=2)
    q, k = (each.unflatten(2, (shape.key_heads, shape.key_dim)) for each in (q, k))
    v = v.unflatten(2, (shape.value_heads, shape.value_dim))
    return (_normalized(q) * shape.key_dim**-0.5, _normalized(k), v) if shape.solves else (q, k, v)


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Tensor,
    decays: Tensor,
    state: Tensor,
    visible: Tensor | None,
    *,
    solves: bool,
) -> tuple[Tensor, Tensor]:
    """o and u [n, D, value_heads, V] by the formulas above."""
    size, shared = q.shape[1], v.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [n, heads, D, *]
    if visible is None:
        visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()[None]
    sums = (visible.to(decays.dtype) @ decays.flatten(2)).unflatten(2, decays.shape[2:])
    sums = sums.transpose(1, 2)  # G, [n, value_heads, D, 1 or K]
    read = torch.stack([q, k] if solves else [q])
    scores, *products = _products(read, k, sums, visible, shared)
    grown, rates = sums.exp(), rates.transpose(1, 2)[..., None]
    from_state = (read.repeat_interleave(shared, 2) * grown) @ state
    updates = rates * (v - from_state[1] if solves else v)
    if solves:
        updates = torch.linalg.solve_triangular(rates * products[0], updates, upper=False, unitriangular=True)
    out = from_state[0] + scores @ updates
    return out.transpose(1, 2), updates.transpose(1, 2)


def _products(read: Tensor, k: Tensor, sums: Tensor, visible: Tensor, shared: int) -> Tensor:
    """<x, k> for each x of `read` [x, n, key_heads, D, K]: [x, n, value_heads, D, D], 0 where a row sees nothing."""

    def factors(rows: slice) -> Tensor:
        """e^{G_i - G_j}, [n, value_heads, rows, D, 1 or K]."""
        between = sums[:, :, rows, None] - sums[:, :, None]
        return between.masked_fill(~visible[:, None, rows, :, None], float("-inf")).exp()

    if sums.shape[-1] == 1:
        return (read @ k.transpose(2, 3)).repeat_interleave(shared, 2) * factors(slice(None))[..., 0]
    read, k = read.repeat_interleave(shared, 2), k.repeat_interleave(shared, 1)
    blocks = [slice(first, first + _ROWS) for first in range(0, sums.shape[2], _ROWS)]
    parts = [torch.einsum("xnhic,nhjc,nhijc->xnhij", read[:, :, :, rows], k, factors(rows)) for rows in blocks]
    return torch.cat(parts, dim=3)


def after_path(
    state: Tensor, ring: Tensor, nodes: RecurrentNodes, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """State and ring after chains of nodes: of `recurrent_nodes`, or the accepted paths of trees.

    lengths: int64 [n], the nodes of each chain that count, the first ones. None: all.
    """
    size = nodes.inputs.shape[1]
    if state.numel():
        state = _after(state, nodes, lengths)
    past, kept = torch.cat([ring, nodes.inputs], dim=1), ring.shape[1]
    if lengths is None:
        return state, past[:, size:]
    newest = lengths[:, None] + torch.arange(kept, device=lengths.device)
    return state, past.gather(1, newest[..., None].expand(-1, -1, past.shape[2]))


def tree_taps(parents: Tensor, kernel: int) -> Tensor:
    """int64 [bs, D, kernel]: each node and its kernel - 1 last ancestors, as places in (ring, nodes), newest first.

    parents: int64 [bs, D], -1 at the root, before which stands the end of the ring.
    """
    before = torch.arange(-1, kernel - 2, device=parents.device).clamp_(min=0).expand(len(parents), -1)
    above = torch.cat([before, parents + (kernel - 1)], dim=1)  # the place before each place
    place = torch.arange(kernel - 1, above.shape[1], device=parents.device).expand(len(parents), -1)
    places = [place]
    for _ in range(kernel - 1):
        place = above.gather(1, place)
        places.append(place)
    return torch.stack(places, dim=2)


def _after(state: Tensor, nodes: RecurrentNodes, lengths: Tensor | None) -> Tensor:
    """The state after chains of nodes, see `after_path`."""
    updates, heads = nodes.updates, nodes.updates.shape[2]
    decays = nodes.decays.unflatten(2, (heads, -1))
    if lengths is not None:
        counts = (torch.arange(updates.shape[1], device=lengths.device) < lengths[:, None])[..., None, None]
        decays, updates = decays.where(counts, 0.0), updates.where(counts, 0.0)
    sums = decays.cumsum(1)  # [n, D, value_heads, 1 or K]
    keys = nodes.keys.repeat_interleave(heads // nodes.keys.shape[2], 2) * (sums[:, -1:] - sums).exp()
    added: Tensor = keys.permute(0, 2, 3, 1) @ updates.transpose(1, 2)
    decayed: Tensor = state * sums[:, -1].exp()[..., None]
    return decayed + added


def _convolved(x: Tensor, ring: Tensor, layer: RecurrentLayer, taps: Tensor | None) -> Tensor:
    """[n, D, channels], each channel by itself, in at least float32."""
    weight, bias = layer.conv, layer.conv_bias
    past, size, kernel = torch.cat([ring, x], dim=1), x.shape[1], weight.shape[1]
    wide = torch.promote_types(past.dtype, torch.float32)
    past, weight = past.to(wide), weight.to(wide)
    out = torch.zeros_like(x, dtype=wide) if bias is None else bias.to(wide).expand(x.shape)
    for back in range(kernel):
        if taps is None:
            tap = past[:, kernel - 1 - back : kernel - 1 - back + size]
        else:
            tap = past.gather(1, taps[:, :, back, None].expand(-1, -1, past.shape[2]))
        out = torch.addcmul(out, tap, weight[:, kernel - 1 - back])
    return out


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
