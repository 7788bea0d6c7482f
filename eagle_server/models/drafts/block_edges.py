"""What the token before a drafted one adds to its score, how sure a row is, and the convolutions between rows.

With parent a, candidate b and the row y that scores b, the score U(b) becomes U(b) + edge(a, b):

    selector (DFlash 2)   edge = sum_r A[a, r] (P y)[r] Z[b, r]               A, Z: predecessor, successor codebook
    Markov (DSpark)       edge = W2[b] . m(a, y),   e = W1[a]
        vanilla           m = e
        gated             m = sigmoid(gate [y; e]) * e
        rnn               m = tanh(o);  (g, c, o) = joint [s; e; y];  s = 0 at the root
                          s' = sig(g) s + (1 - sig(g)) tanh(c)
    Domino                edge = P2[b] . silu(P0 [y; s']),   s' = GRU(e(a), s),   s = 0 at the root

e(a) is the target's embedding. Domino's GRU reads the root, too, but with `pure_draft_prefix_len` 1 the root's edges
are zero. Weights are torch's, in the order reset, update, new.

Confidence (DSpark): sigmoid(w [y; e] + b) estimates the chance that the row's draft is accepted, given all before it.

Source: z-lab's DFlash 2, DSpark (arXiv 2607.05147, deepseek-ai/DeepSpec), and Domino (arXiv 2605.29707, SpecForge).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.layers import Linear, Views
from eagle_server.ops.native.decoder import ConvolutionWeights
from eagle_server.ops.native.drafting import SelectorRows
from eagle_server.ops.native.library import floats

CANDIDATES = 16  # of a row, among which a selector chooses, unless stated: they hold the right token in 99.5 %
EdgeKind = Literal["selector", "vanilla", "gated", "rnn", "gru"]


@dataclass(frozen=True)
class EdgeConfig:
    """Which edges, and their rank r.

    state_size: of the GRU. after_root: whether the root's edges are not zero. candidates: how many of a row's best
    tokens get edges; 0: all.
    """

    kind: EdgeKind
    rank: int
    state_size: int = 0
    after_root: bool = True
    candidates: int = 0


class Edges(nn.Module):
    """The edges of a head with `vocab` target tokens, of which it drafts `drafts`.

    A selector scores few candidates, by their rows of `after`. The others score all drafts, by the layer `to_scores`.
    """

    def __init__(self, config: EdgeConfig, hidden: int, vocab: int, drafts: int, target: TargetWeights) -> None:
        super().__init__()
        self.kind, self.rank, self.after_root, self._target = config.kind, config.rank, config.after_root, target
        self.candidates = config.candidates
        self.gru = GRUCell(hidden, config.state_size) if config.kind == "gru" else None
        self.before = None if self.gru is not None else nn.Parameter(torch.empty(vocab, config.rank))
        scores = None if config.kind == "selector" else [("2" if config.kind == "gru" else "markov_w2", drafts)]
        self.after = nn.Parameter(torch.empty(drafts, config.rank)) if scores is None else None
        self.to_scores = None if scores is None else Linear(config.rank, scores)
        name, inputs, outputs, bias = {
            "selector": ("hidden_projection", hidden, self.rank, False),
            "vanilla": ("", 0, 0, False),
            "gated": ("gate_proj", hidden + self.rank, self.rank, True),
            "rnn": ("joint_proj", 2 * self.rank + hidden, 3 * self.rank, True),
            "gru": ("0", hidden + config.state_size, self.rank, False),
        }[self.kind]
        self.mix = Linear(inputs, [(name, outputs)], bias=bool(bias)) if name else None

    def forward(
        self, y: Tensor, parents: Tensor, candidates: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What a selector adds to the scores of one row's candidates, float32 [bs, nodes, C], and the state below the
        parents.

        y [bs, H], parents int64 [bs, nodes] target ids, candidates int64 [bs, 1 or nodes, C] draft ids, state [bs,
        nodes, r] of what is above the parents; None: they are the roots, or these edges have no state.
        """
        assert self.after is not None
        m, state = self.factors(y, parents, state)
        added: Tensor = (m[:, :, None].float() * F.embedding(candidates, self.after).float()).sum(-1)
        return added, state

    def native_rows(self, y: Tensor, roots: Tensor, least: int) -> SelectorRows | None:
        """A selector's edges for the native kernels, over rows y [rows, H] of trees with roots int64 [bs].

        least: candidates of a row at least. None: these are other edges.
        """
        if self.before is None or self.after is None or self.before.dtype != self.after.dtype:
            return None
        count = min(max(least, self.candidates), len(self.after))
        mixed = floats(self._mixed(y.to(self.after.dtype)))
        return SelectorRows(self.before.detach(), self.after.detach(), mixed, roots.contiguous(), count)

    def to_all(self, y: Tensor, parents: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the others add to the scores of the whole draft vocabulary: [bs, nodes, Vd], and the state below the
        parents. Arguments as in `forward`.
        """
        assert self.to_scores is not None
        m, state = self.factors(y, parents, state)
        added: Tensor = self.to_scores(m.flatten(0, 1).to(self.to_scores.output_dtype))
        return added.view(*m.shape[:2], -1), state

    def factors(self, y: Tensor, parents: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """m [bs, nodes, r], whose product with the last weights is what is added, and the state below the parents."""
        e = F.embedding(parents, self._target.embed if self.before is None else self.before)
        y = y.to(e.dtype)
        rows = y[:, None].expand(-1, parents.shape[1], -1)
        if self.kind == "selector":
            assert self.mix is not None
            return e * self._mixed(y)[:, None], state
        if self.kind == "gated":
            return e * self._mixed(torch.cat([rows, e], dim=-1)).sigmoid(), state
        if self.kind == "rnn":
            state = torch.zeros_like(e) if state is None else state
            gate, new, out = self._mixed(torch.cat([state, e, rows], dim=-1)).chunk(3, dim=-1)
            return out.tanh(), gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
        if self.gru is not None:
            zero = state is None and not self.after_root
            state = self.gru(e, state)
            m = F.silu(self._mixed(torch.cat([rows, state], dim=-1)))
            return torch.zeros_like(m) if zero else m, state
        return e, state

    def _mixed(self, x: Tensor) -> Tensor:
        assert self.mix is not None
        out: Tensor = self.mix(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        return out

    @property
    def last_weights(self) -> nn.Parameter:
        """[Vd, r], before they are packed."""
        if self.after is not None:
            return self.after
        assert self.to_scores is not None
        return self.to_scores.weight

    def keep_rows(self, token_map: Tensor) -> None:
        """Score these draft tokens alone, int64 [n]. Nothing is packed yet."""
        if self.to_scores is not None:
            self.to_scores = self.to_scores.with_rows(token_map)
        if self.after is not None:
            self.after = nn.Parameter(self.after.detach()[token_map], requires_grad=False)

    def weight_views(self) -> Views:
        prefix = {"selector": "candidate_selector.", "gru": "embed_proj."}.get(self.kind, "markov_head.")
        if self.gru is not None:
            yield from self.gru.weight_views()
        if self.before is not None:
            yield f"{prefix}{'markov_w1.weight' if self.after is None else 'predecessor_codebook'}", self.before
        if self.after is not None:
            yield f"{prefix}successor_codebook", self.after
        for linear in (self.to_scores, self.mix):
            if linear is not None:
                yield from linear.weight_views(prefix)


class Confidence(nn.Module):
    """The confidence of a row, from y [H] or, with `rank`, also from its parent's code e [rank]. In float32."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weight = nn.Parameter(torch.empty(1, hidden + rank, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def forward(self, y: Tensor, parents: Tensor, codes: Tensor | None) -> Tensor:
        """Its logits, float32 [bs, nodes], for y [bs, H] below parents int64 [bs, nodes]. codes [vocab, rank]."""
        rows = y[:, None].expand(-1, parents.shape[1], -1).float()
        if self.rank:
            assert codes is not None, "a Markov head's"
            rows = torch.cat([rows, F.embedding(parents, codes).float()], dim=-1)
        return F.linear(rows, self.weight, self.bias)[..., 0]

    def weight_views(self) -> Views:
        yield "confidence_head.proj.weight", self.weight
        yield "confidence_head.proj.bias", self.bias


class GRUCell(nn.Module):
    """r = sig(R x + R' s), z = sig(Z x + Z' s), n = tanh(N x + r * N' s): the next state is (1 - z) n + z s."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.input = Linear(inputs, [("weight_ih_l0", 3 * size)])
        self.state = Linear(size, [("weight_hh_l0", 3 * size)])

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        """x [bs, nodes, inputs], state [bs, nodes, size] or None: zeros -> the next state."""
        state = x.new_zeros(*x.shape[:2], self.size) if state is None else state
        both = (
            linear(each.flatten(0, 1)).view(*x.shape[:2], -1) for linear, each in ((self.input, x), (self.state, state))
        )
        (xr, xz, xn), (sr, sz, sn) = (each.float().chunk(3, dim=-1) for each in both)
        update, new = torch.sigmoid(xz + sz), torch.tanh(xn + torch.sigmoid(xr + sr) * sn)
        return ((1 - update) * new + update * state).to(x.dtype)

    def weight_views(self) -> Views:
        for linear in (self.input, self.state):
            for name, view in linear.weight_views("prefix_gru."):
                yield name.removesuffix(".weight"), view


class LocalConvolution(nn.Module):
    """DFlash 2's convolution over the rows of a block, before a sublayer and after it.

    kernel = base + kernel_projection(x), x the sublayer's normed input, one dynamic kernel per `group` channels:
    out[i] = sum_t kernel[i, t] * z[i - t] within the block.
    """

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base = nn.Parameter(torch.empty(2, taps, hidden))
        self.projection = Linear(hidden, [("kernel_projection", 2 * taps * (hidden // group))])

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of both sides, [rows, taps, H], from x [rows, H]."""
        dynamic = self.projection(x).unflatten(1, (2, self.taps, -1)).repeat_interleave(self.group, dim=-1)
        before, after = (self.base + dynamic).unbind(1)
        return before, after

    def native_weights(self) -> ConvolutionWeights | None:
        """For the native kernels; None: they do not compute it."""
        projection = self.projection.native
        return None if projection is None else ConvolutionWeights(projection, self.base, self.group)

    def weight_views(self, prefix: str) -> Views:
        yield f"{prefix}base_kernel", self.base
        yield from self.projection.weight_views(prefix)


def convolved(kernel: Tensor, z: Tensor, rows: int) -> Tensor:
    """z [blocks * rows, H] by a kernel [blocks * rows, taps, H]."""
    blocks = z.unflatten(0, (-1, rows))
    shifted = [F.pad(blocks[:, : rows - t], (0, 0, t, 0)).flatten(0, 1) for t in range(min(kernel.shape[1], rows))]
    out: Tensor = sum(kernel[:, t] * z_t for t, z_t in enumerate(shifted))  # type: ignore[assignment]
    return out.to(z.dtype)
