"""Token masks for drafting: drafters propose only tokens that a request's grammar allows.

The mask of the first level is known when a cycle begins. The mask below a drafted node is known when that node is, so
each further level waits for the device. That happens only in batches with grammars; those draft without CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.topk import topk_logprobs
from eagle_server.ops.upload import upload
from eagle_server.plan import Decode
from eagle_server.speculation.transforms import allowed_by
from eagle_server.worker.host import HostCopy

_OFF = float("-inf")
Path = tuple[int, ...]
ToTargetIds = Callable[[Tensor], Tensor]  # from a draft's vocabulary to the target's, int64 of any shape


class DraftTokenMask(Protocol):
    """Which tokens may follow the nodes of one level of every request's tree. The first level's parent is the root."""

    @property
    def is_active(self) -> bool:
        """Whether it masks anything. If so, it waits for the device, and no graph may be captured with it."""
        ...

    def best(self, logits: Tensor, k: int, ids: ToTargetIds | None = None) -> tuple[Tensor, Tensor]:
        """The k best allowed children of each node, given logits [bs * nodes, draft vocabulary].

        Returns log-probabilities among the allowed tokens, float32 [bs * nodes, k], and target ids, int64. A child that
        is not allowed has -inf; so have all children of a node that is not allowed.
        """
        ...

    def advance(self, tokens: Tensor, chosen: Tensor | None = None, fan_out: int = 1) -> DraftTokenMask:
        """The mask of the next level, whose tokens are int64 [bs, nodes].

        `chosen` // fan_out, int64 [bs, nodes], are the columns of their parents (None: all have the first one).
        """
        ...

    def without_refused(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """The drafted tokens, with padding (-1) where the score -inf says that the grammar refuses a token."""
        ...


class NoTokenMask:
    """No request has a grammar: all tokens are allowed."""

    is_active = False

    def best(self, logits: Tensor, k: int, ids: ToTargetIds | None = None) -> tuple[Tensor, Tensor]:
        logp, found = topk_logprobs(logits, k)
        return logp, found if ids is None else ids(found)

    def advance(self, tokens: Tensor, chosen: Tensor | None = None, fan_out: int = 1) -> DraftTokenMask:
        return self

    def without_refused(self, tokens: Tensor, scores: Tensor) -> Tensor:
        return tokens


NO_TOKEN_MASK = NoTokenMask()


@dataclass(frozen=True)
class GrammarTokenMask:
    """The masks of the requests with grammars, which stand at `requests` in the batch."""

    requests: tuple[int, ...]
    decodes: tuple[Decode, ...]
    paths: tuple[tuple[Path, ...], ...]  # of each request, to the nodes of the level, equally many
    is_active = True

    def best(self, logits: Tensor, k: int, ids: ToTargetIds | None = None) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(logits.shape[1], device=logits.device)
        tokens = tokens if ids is None else ids(tokens)
        masks = np.stack([_masks(decode, paths) for decode, paths in zip(self.decodes, self.paths, strict=True)])
        masked = logits.unflatten(0, (-1, len(self.paths[0]))).clone()
        for request, bits in zip(self.requests, upload(masks, logits.device, torch.int32), strict=True):
            masked[request].masked_fill_(~allowed_by(bits, tokens), _OFF)
        logp, found = topk_logprobs(masked.flatten(0, 1), k)
        logp = logp.nan_to_num(nan=_OFF, neginf=_OFF)  # NaN where no token is allowed
        return logp, tokens.index_select(0, found.view(-1)).view_as(found)

    def advance(self, tokens: Tensor, chosen: Tensor | None = None, fan_out: int = 1) -> DraftTokenMask:
        found, places = HostCopy(tokens, torch.zeros_like(tokens) if chosen is None else chosen).lists()
        return replace(
            self,
            paths=tuple(
                tuple((*paths[place // fan_out], token) for token, place in zip(found[n], places[n], strict=True))
                for n, paths in zip(self.requests, self.paths, strict=True)
            ),
        )

    def without_refused(self, tokens: Tensor, scores: Tensor) -> Tensor:
        return tokens.masked_fill(scores.isneginf(), -1)


def draft_token_mask(decodes: Sequence[Decode]) -> DraftTokenMask:
    """The mask of the first level of a cycle's trees."""
    masked = [n for n, decode in enumerate(decodes) if decode.grammar_matcher is not None and decode.speculative]
    if not masked:
        return NO_TOKEN_MASK
    return GrammarTokenMask(tuple(masked), tuple(decodes[n] for n in masked), (((),),) * len(masked))


def _masks(decode: Decode, paths: Sequence[Path]) -> NDArray[np.int32]:
    """Bits of int32 [nodes, words]; no bit is set below a node that the grammar refuses."""
    matcher = decode.grammar_matcher
    assert matcher is not None
    found = [matcher.mask(decode.text, path) for path in paths]
    nothing = np.zeros(matcher.words, dtype=np.int32)
    return np.stack([nothing if mask is None else mask for mask in found])
