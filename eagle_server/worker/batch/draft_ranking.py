"""How drafters rank the children of a node: grammar, sampling parameters, then the noise of the target's own draw.

At temperature T > 0 the target draws y = argmax(log p / T + G) with noise G that depends on the key and the position
only. It is known before the target runs, so drafters rank by log q / T + G and guess the draw itself. No text depends
on that: a draw does not look at the draft.

Source: Daliri, Musco, Suresh (2024), "Coupling without communication and drafter-invariant speculative decoding".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.ops.native.sampling import of_rows
from eagle_server.ops.sampling.topk import DrawNoise, score_children, topk_logprobs
from eagle_server.ops.sampling.truncate import above_min_ps
from eagle_server.ops.tree.candidates import Children
from eagle_server.plan import Decode
from eagle_server.speculation.sampling import SamplingBatch, transformed
from eagle_server.speculation.transforms import allowed_by
from eagle_server.speculation.tree import Tree, without
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.host import to_host

_OFF = float("-inf")
Path = tuple[int, ...]


@dataclass(frozen=True)
class DraftRanking:
    """The ranking of the children of one level's nodes, in every request's tree. The first level's parent is the root.

    A child's score is its log-probability after all that applies. `positions` are those of the first level's tokens;
    each further level adds one. Without noise, and for greedy requests, children rank by probability.
    """

    positions: Tensor | None = None  # int64 [bs]
    grammars: GrammarPaths | None = None
    parameters: SamplingParameters | None = None
    noise: KeyedNoise | None = None
    estimates: AcceptanceEstimates | None = None
    temperature_bin: Tensor | None = None  # int64 [bs], see `RequestSampling.temperature_bin`, for the estimates
    level: int = 0

    @property
    def has_grammars(self) -> bool:
        """Whether a request has a grammar. Then each level waits for the device, and no graph is captured."""
        return self.grammars is not None

    @property
    def is_plain(self) -> bool:
        """Whether no grammar and no sampling parameter changes the ranking. If not, children may be refused."""
        return self.grammars is None and self.parameters is None

    def without_grammars(self) -> DraftRanking:
        return replace(self, grammars=None)

    def best(self, logits: Tensor, k: int, vocabulary: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k best children of each node, given logits [bs * nodes, draft vocabulary].

        `vocabulary` int64 [draft vocabulary] are the target ids of the draft's tokens; None: they are the same.

        Returns scores float32 [bs * nodes, k], descending, and target ids, int64. Scores are logarithms of estimated
        chances that a child is the target's draw; they add up to at most 1. A child that is not allowed has -inf; so
        have all children of a node that is not allowed.
        """
        logp, tokens = topk_logprobs(self._allowed(logits, vocabulary), k, vocabulary, self._draw_noise)
        return logp if self.is_plain else finite_or_off(logp), tokens  # NaN where no token is allowed

    def children(self, logits: Tensor, above: Tensor, out: Children, vocabulary: Tensor | None = None) -> Children:
        """Write `best` of each node to `out` [bs, nodes, k], a level of a pool. Returns it.

        above: float32 [bs, nodes], scores of the nodes' paths. Those of the children are with corrected chances.
        """
        correction = None
        if self.estimates is not None:
            assert self.temperature_bin is not None
            correction = self.estimates.correction(self.temperature_bin, self.level)
        score_children(self._allowed(logits, vocabulary), above, out, vocabulary, self._draw_noise, correction)
        if not self.is_plain:
            for part in (out.scores, out.guesses):
                part.copy_(finite_or_off(part))
        return out

    def _allowed(self, logits: Tensor, vocabulary: Tensor | None) -> Tensor:
        """The logits after grammar and sampling parameters."""
        if self.grammars is not None:
            logits = self.grammars.masked(logits, vocabulary)
        if self.parameters is not None:
            assert self.positions is not None
            logits = self.parameters.applied(logits, self.positions + self.level, vocabulary)
        return logits

    @property
    def _draw_noise(self) -> DrawNoise | None:
        """Of the draws that the level's children are for."""
        if self.noise is None:
            return None
        assert self.positions is not None
        return DrawNoise(self.noise.keys, self.positions, self.noise.temperature, self.level)

    def noise_of_levels(self, levels: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Key, position and temperature of one row per level, each [bs * levels], a request's rows together.

        None: there is no noise.
        """
        if self.noise is None:
            return None, None, None
        assert self.positions is not None
        places = self.positions[:, None] + torch.arange(levels, device=self.positions.device)
        keys, temperature = of_rows(places.numel(), self.noise.keys, self.noise.temperature)
        return keys, places.flatten(), temperature

    def conditioned(self, logp: Tensor, edges: Tensor) -> Tensor:
        """The scores of candidates if `edges` [bs, nodes, C] are added to their logits, of the same shape.

        logp [bs, 1 or nodes, C] are the scores of `best` without them. All other tokens keep their logits.
        """
        if self.noise is not None:
            t = self.noise.temperature[:, None, None]
            edges = edges / torch.where(t > 0, t, 1.0)
        added = logp + edges
        others = torch.log1p(-logp.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
        return added - torch.logaddexp(others, added.logsumexp(-1, keepdim=True))

    def chances(self, scores: Tensor) -> Tensor:
        """The scores of `best`, corrected by what was accepted before; -inf stays."""
        if self.estimates is None:
            return scores
        assert self.temperature_bin is not None
        return self.estimates.corrected(scores, self.temperature_bin, self.level)

    def advance(self, tokens: Tensor, chosen: Tensor | None = None, topk: int = 1) -> DraftRanking:
        """The ranking below the next level, whose tokens are int64 [bs, nodes].

        `chosen` // topk, int64 [bs, nodes], are the columns of their parents (None: all have the first one).
        """
        grammars = None if self.grammars is None else self.grammars.advance(tokens, chosen, topk)
        return replace(self.deeper(), grammars=grammars)

    def deeper(self) -> DraftRanking:
        """The ranking one level further, for drafters without grammars that need no tokens of the level."""
        return replace(self, level=self.level + 1)

    def without_refused(self, tree: Tree) -> Tree:
        """The tree with padding where the score -inf says that a token is not allowed."""
        assert tree.scores is not None
        return tree if self.is_plain else without(tree, tree.scores.isneginf())


BY_PROBABILITY = DraftRanking()


def finite_or_off(scores: Tensor) -> Tensor:
    """Scores with -inf instead of NaN."""
    return scores.nan_to_num(nan=_OFF, neginf=_OFF)


@dataclass(frozen=True)
class GrammarPaths:
    """The requests with grammars, at the numbers `requests` in the batch, and the nodes of one level of their trees.

    The mask of the first level is known when a cycle begins. The mask below a drafted node is known when that node is,
    so each further level waits for the device.
    """

    requests: tuple[int, ...]
    decodes: tuple[Decode, ...]
    paths: tuple[
        tuple[Path, ...], ...
    ]  # of each request, the tokens from the root to each node of the level, equally many

    @classmethod
    def of(cls, decodes: Sequence[Decode]) -> GrammarPaths | None:
        """At the roots of a cycle's trees. None: no request that drafts has a grammar."""
        masked = [n for n, decode in enumerate(decodes) if decode.grammar_matcher is not None]
        return cls(tuple(masked), tuple(decodes[n] for n in masked), (((),),) * len(masked)) if masked else None

    def masked(self, logits: Tensor, vocabulary: Tensor | None) -> Tensor:
        """The logits [bs * nodes, draft vocabulary] with -inf for tokens that a grammar forbids."""
        tokens = torch.arange(logits.shape[1], device=logits.device) if vocabulary is None else vocabulary
        masks = np.stack([_masks(decode, paths) for decode, paths in zip(self.decodes, self.paths, strict=True)])
        masked: Tensor = logits.unflatten(0, (-1, len(self.paths[0]))).clone()
        for request, bits in zip(self.requests, upload(masks, logits.device, torch.int32), strict=True):
            masked[request].masked_fill_(~allowed_by(bits, tokens), _OFF)
        return masked.flatten(0, 1)

    def advance(self, tokens: Tensor, chosen: Tensor | None, topk: int) -> GrammarPaths:
        """The nodes of the next level; see `DraftRanking.advance`. Waits for the device."""
        token_lists, places = to_host(tokens, torch.zeros_like(tokens) if chosen is None else chosen)
        return replace(
            self,
            paths=tuple(
                tuple((*paths[place // topk], token) for token, place in zip(token_lists[n], places[n], strict=True))
                for n, paths in zip(self.requests, self.paths, strict=True)
            ),
        )


@dataclass(frozen=True)
class SamplingParameters:
    """What the requests' parameters do to logits before the draw, as known at the root of the tree."""

    sampling: SamplingBatch
    vocab_size: int  # the target's

    def applied(self, logits: Tensor, positions: Tensor, vocabulary: Tensor | None) -> Tensor:
        """Logits [bs * nodes, draft vocabulary] after the transforms and min_p of all requests.

        Transforms take target ids, so they see the logits of the target's vocabulary: -inf for all other tokens. Top-k
        and top-p would need a sort, and hardly help.
        """
        rows, sampling = logits.float().unflatten(0, (len(positions), -1)), self.sampling
        if sampling.transforms:
            target_ids = torch.arange(logits.shape[1], device=logits.device) if vocabulary is None else vocabulary
            wide = rows.new_full((*rows.shape[:2], self.vocab_size), _OFF).index_copy_(2, target_ids, rows)
            where = positions[:, None].expand(-1, rows.shape[1])
            rows = transformed(wide, where, sampling).index_select(2, target_ids)
        kept: Tensor = above_min_ps(rows, sampling.all_temperature, sampling.limits, sampling.floored).flatten(0, 1)
        return kept


@dataclass(frozen=True)
class KeyedNoise:
    """Noise that is made where it is used, from the requests' keys. Greedy requests (T = 0) get none."""

    keys: Tensor  # int64 [bs]
    temperature: Tensor  # float32 [bs]


def _masks(decode: Decode, paths: Sequence[Path]) -> NDArray[np.int32]:
    """Bits of int32 [nodes, words]; no bit is set below a node that the grammar refuses."""
    matcher = decode.grammar_matcher
    assert matcher is not None
    masks = [matcher.mask(decode.all_tokens, path) for path in paths]
    nothing = np.zeros(matcher.words, dtype=np.int32)
    return np.stack([nothing if mask is None else mask for mask in masks])
