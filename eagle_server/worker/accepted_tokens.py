"""Accepted tokens that wait for the next draft-extend, with the target's features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eagle_server.plan import Decode


class AcceptedTokens:
    """Per row of req_to_token: the tokens that the last cycle accepted, each with the target's feature before it.

    Entry j of a request pairs the token at position start + j + 1 with the feature of position start + j. How many
    entries count follows from its sequence length: seq_len - start. The others hold some valid token and finite
    features.
    """

    def __init__(self, requests: int, width: int, device: torch.device) -> None:
        """`width`: the most tokens that one cycle accepts, the bonus included."""
        self.width = width
        self._tokens = torch.zeros(requests, width, dtype=torch.int64, device=device)
        self._features: Tensor | None = None
        self._starts: dict[int, int] = {}

    def record(
        self, starts: Iterable[tuple[int, int]], req_pool_indices: Tensor, tokens: Tensor, features: Tensor
    ) -> None:
        """Keep tokens int64 [n, w] and features [n, w, F] of the requests req_pool_indices int64 [n].

        `starts` has (req_pool_index, position of the first feature) of each; padding rows have none.
        """
        if self._features is None:
            shape = (*self._tokens.shape, features.shape[2])
            self._features = torch.zeros(shape, dtype=features.dtype, device=features.device)
        width = tokens.shape[1]
        self._tokens[:, :width].index_copy_(0, req_pool_indices, tokens)
        self._features[:, :width].index_copy_(0, req_pool_indices, features)
        self._starts.update(starts)

    def counts(self, decodes: Sequence[Decode]) -> tuple[int, ...]:
        """How many entries each request has for draft-extend, at least the bonus."""
        return tuple(d.seq_len - self._starts.get(d.req_pool_index, d.seq_len - 1) for d in decodes)

    def take(self, req_pool_indices: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` entries of requests: tokens [n * width], features [n * width, F]."""
        assert self._features is not None, "nothing was recorded yet"
        tokens = self._tokens.index_select(0, req_pool_indices)[:, :width]
        return tokens.reshape(-1), self._features.index_select(0, req_pool_indices)[:, :width].flatten(0, 1)

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        self._starts.pop(req_pool_index, None)
