"""EAGLE's draft-extend and all its draft steps by the native kernels, one call each.

`worker.drafters.pairs` and `multi_step` are the reference, and compute what these calls do not: grammars and sampling
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import byref, c_int64
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from eagle_server.ops.native.decoder import NativeDecoder, NativeRows
from eagle_server.ops.native.library import check_inside, empty, floats, functions, pointer, session
from eagle_server.ops.native.linear import Biased
from eagle_server.ops.native.sampling import NativeScoring
from eagle_server.ops.native.structs import (
    AcceptedStruct,
    CandidatesStruct,
    CountsStruct,
    EstimatesStruct,
    HeadStruct,
    PackedStruct,
    RequestsStruct,
    SelectorStruct,
    TreeStruct,
)
from eagle_server.ops.tree.candidates import BestCandidates


class Residual(IntEnum):
    """The residual stream before a head's first layer: the input itself, or the hidden state as it is or normed."""

    JOINED = 0
    HIDDEN = 1
    NORMED_HIDDEN = 2


@dataclass(frozen=True)
class HeadWeights:
    """A draft head as the kernels compute it. Its parts are the normed embedding and the normed hidden state.

    combine: features to hidden states; None: they are hidden states. joined: the parts side by side to the decoder's
    input; None: they are the input. feeds_normed: the feedback is the normed stream. uses_hidden: whether there is a
    second part. embed_scale: of embeddings, without a norm of their own.
    """

    decoder: NativeDecoder
    lm_head: Biased
    embed: Tensor
    residual: Residual
    feeds_normed: bool
    combine: Biased | None = None
    joined: Biased | None = None
    embed_norm: Tensor | None = None
    hidden_norm: Tensor | None = None
    uses_hidden: bool = True
    embed_scale: float = 1.0


@dataclass(frozen=True)
class DraftRequests:
    """The requests of a call. int64 [bs], except the page table and temperature float32 [bs].

    keys, positions and temperature rank the children of the roots by noise, see `topk_logprobs`; None: there is
    none.
    """

    seq_lens: Tensor
    extend_lens: Tensor
    req_pool_indices: Tensor
    req_to_token: Tensor
    keys: Tensor | None = None
    positions: Tensor | None = None
    temperature: Tensor | None = None


def correction(ratios: Tensor, edges: Tensor, temperature_bin: Tensor, most: float) -> EstimatesStruct:
    """What corrects guesses, see `AcceptanceEstimates`. The caller keeps the tensors.

    ratios: float32 [temperatures, depths, 2, bins]. edges: of the bins. temperature_bin: int64 [bs].
    """
    return EstimatesStruct(*map(pointer, (ratios, edges, temperature_bin)), ratios.shape[1], len(edges), most)


def count_accepted(
    counts: CountsStruct,
    tree: tuple[Tensor, Tensor, Tensor],
    path: Tensor,
    guesses: Tensor,
    temperature_bin: Tensor,
    numbers: Sequence[int] | None,
    proposed: Tensor | None,
) -> None:
    """Count the nodes of verified trees whose parents were accepted, and correct the ratios.

    Args:
        counts: see `AcceptanceEstimates`.
        tree: tokens, parents and depths of all trees, int64 [bs, D].
        path: int64 [bs, steps + 1], as `walk_tree` finds it.
        guesses: float32 [drafted, n], the drafter's log chances. temperature_bin: int64 [drafted].
        numbers: of the trees that were drafted; None: all.
        proposed: int64 [bs, D - 1], the nodes' places in `guesses`; None: the same places.

    Raises:
        IndexError: a depth, parent or place is none.
    """
    given = [*(each.contiguous() for each in tree), path.contiguous(), guesses.contiguous(), temperature_bin]
    tokens, parents, depths, walked, found, bins = map(pointer, given)
    trees = TreeStruct(tokens, parents, depths, None, None, None, tree[0].shape[1], path.shape[1] - 1)
    own = None if numbers is None else (c_int64 * len(numbers))(*numbers)
    places = None if proposed is None else proposed.contiguous()
    outside: int = functions().eagle_count_accepted(
        *(byref(counts), byref(trees), len(guesses), own, bins, walked, found, guesses.shape[1]),
        None if places is None else pointer(places),
    )
    check_inside(outside=bool(outside))


class NativeHead:
    """A head over its caches. Draft-extend finds `topk` children of each root."""

    def __init__(
        self, weights: HeadWeights, caches: Sequence[tuple[Tensor, Tensor]], topk: int, ids: Tensor | None
    ) -> None:
        """ids: int64 [draft vocabulary], the target ids of the draft's tokens; None: they are the same."""
        assert topk <= weights.lm_head[0].outputs
        self.weights, self.caches, self.topk = weights, caches, topk
        biased = (weights.combine, weights.joined, weights.lm_head)
        biases = [None if each is None or each[1] is None else floats(each[1].detach()) for each in biased]
        norms = [None if each is None else floats(each.detach()) for each in (weights.embed_norm, weights.hidden_norm)]
        self._embed = weights.embed.detach().contiguous()
        self._tensors = [*biases, *norms, ids]  # keeps them alive
        self._struct = HeadStruct(
            weights.decoder.struct(caches),
            *(
                PackedStruct() if each is None else each[0].struct(bias)
                for each, bias in zip(biased, biases, strict=True)
            ),
            *(None if each is None else pointer(each) for each in (self._embed, *norms, ids)),
            *(int(self._embed.dtype == torch.bfloat16), int(weights.uses_hidden)),
            *(int(weights.residual), int(weights.feeds_normed), weights.embed_scale),
        )

    def prefill(self, tokens: Tensor, features: Tensor | None, positions: Tensor, rows: NativeRows) -> None:
        """Write the draft's KV of prompt rows. No output is computed.

        Args:
            tokens, positions: int64 [rows]. features: [rows, F]; None: the head uses none.
        """
        places, ids = positions.contiguous(), tokens.contiguous()
        full = None if features is None else floats(features)
        rows.struct.positions = pointer(places)
        outside: int = functions().eagle_draft_prefill(
            *(session(), byref(self._over_caches()), byref(rows.struct)),
            *(pointer(ids), None if full is None else pointer(full)),
        )
        check_inside(outside=bool(outside))

    def extend(self, requests: DraftRequests, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rewrite the draft's KV of the accepted tokens. Then the children of each request's newest one.

        Args:
            tokens: int64 [rows of the page table, width]. features: [.., .., F].

        Returns:
            feedback float32 [bs, H], logp float32 [bs, topk] and target ids int64 [bs, topk].
        """
        bs, width = len(requests.seq_lens), tokens.shape[1]
        feedback, logp = empty(bs, self.weights.decoder.hidden), empty(bs, self.topk)
        found = torch.empty(bs, self.topk, dtype=torch.int64)
        is_bf16 = int(features.dtype == torch.bfloat16)
        accepted = AcceptedStruct(pointer(tokens), pointer(features), is_bf16, width, features.shape[2])
        outside: int = functions().eagle_draft_extend(
            *(session(), byref(self._over_caches()), byref(_struct(requests, self.topk)), byref(accepted)),
            *map(pointer, (feedback, logp, found)),
        )
        check_inside(outside=bool(outside))
        return feedback, logp, found

    def steps(
        self,
        requests: DraftRequests,
        corrected: EstimatesStruct | None,
        steps: int,
        count: int,
        least: float,
        logp: Tensor,
        tokens: Tensor,
        hidden: Tensor,
    ) -> tuple[BestCandidates, Tensor]:
        """All draft steps after draft-extend, and at most `count` candidates, the best.

        Args:
            corrected: see `correction`.
            least: candidates with a lower score are left out, or padding if others have more.
            logp, tokens: [bs, topk], the first level. As many nodes are fed of each further one.
            hidden: float32 [bs * topk, H], the feedback at the first level's parents.

        Returns:
            The candidates, and the parent_list of `link_tree`.
        """
        bs, topk = tokens.shape
        estimates, best = corrected or EstimatesStruct(), _Candidates(bs, topk, steps, count, least)
        given = [logp.contiguous(), tokens.contiguous(), floats(hidden)]
        size: int = functions().eagle_draft_steps(
            *(session(), byref(self._over_caches()), byref(_struct(requests, topk)), byref(estimates), steps),
            *(*map(pointer, given), byref(best.struct)),
        )
        check_inside(outside=size < 0)
        return best.found(size), best.parents

    def _over_caches(self) -> HeadStruct:
        self._struct.decoder = self.weights.decoder.struct(self.caches)  # a forward may have bound other caches
        return self._struct


class _Candidates:
    """Memory for at most `count` candidates of `bs` requests, and for the parent_list of `link_tree`."""

    def __init__(self, bs: int, topk: int, steps: int, count: int, least: float) -> None:
        count = min(count, topk + steps * topk**2)
        tokens, selected = (torch.empty(bs, count, dtype=torch.int64) for _ in range(2))
        self.parents = torch.empty(bs, topk * steps + 1, dtype=torch.int64)
        scores, guesses = empty(bs, count), empty(bs, count)
        self.struct = CandidatesStruct(*map(pointer, (tokens, selected, self.parents, scores, guesses)), count, least)
        self._parts = selected, tokens, scores, guesses

    def found(self, size: int) -> BestCandidates:
        """`size` of each request were written, one request after the other."""
        bs = len(self.parents)
        return BestCandidates(*(each.view(-1)[: bs * size].view(bs, size) for each in self._parts))


@dataclass(frozen=True)
class SelectorRows:
    """DFlash 2's edges over rows of scores: parent a adds sum_r before[a, r] * mixed[row, r] * after[b, r] to the score
    of a candidate b, of which each row has `candidates`.

    before [vocab, rank] by target ids, after [draft vocabulary, rank] by draft ids, in one dtype. mixed: float32 [rows,
    rank]. roots: int64 [bs], target ids.
    """

    before: Tensor
    after: Tensor
    mixed: Tensor
    roots: Tensor
    candidates: int

    def struct(self) -> SelectorStruct:
        """Over these tensors, which must outlive it."""
        parts = (self.before, self.after, self.mixed, self.roots)
        assert all(each.is_contiguous() for each in parts)
        is_bf16 = int(self.before.dtype == torch.bfloat16)
        return SelectorStruct(*map(pointer, parts), self.before.shape[1], is_bf16, self.candidates)


def row_trees(
    scoring: NativeScoring,
    bs: int,
    topk: int,
    corrected: EstimatesStruct | None,
    count: int,
    selector: SelectorRows | None = None,
) -> tuple[BestCandidates, Tensor]:
    """The `count` best candidates over rows of scores, and the parent_list of `link_tree`.

    Row j of a request scores the children of all nodes of level j, of which `topk` have children.

    Args:
        scoring: of `bs` requests, one after the other, equally many rows each.
        corrected: see `correction`.
        selector: what parents add; None: rows score alike below all parents.
    """
    steps, estimates = scoring.rows // bs - 1, corrected or EstimatesStruct()
    best = _Candidates(bs, topk, steps, count, -math.inf)
    size = functions().eagle_row_trees(
        *(session(), byref(scoring.struct), None if selector is None else byref(selector.struct())),
        *(bs, topk, byref(estimates), byref(best.struct)),
    )
    return best.found(size), best.parents


def _struct(requests: DraftRequests, topk: int) -> RequestsStruct:
    table = requests.req_to_token
    own = (requests.seq_lens, requests.extend_lens, requests.req_pool_indices, table)
    noise = (requests.keys, requests.positions, requests.temperature)
    pointers = (None if each is None else pointer(each) for each in noise)
    return RequestsStruct(len(requests.seq_lens), topk, *map(pointer, own), table.shape[1], *pointers)
