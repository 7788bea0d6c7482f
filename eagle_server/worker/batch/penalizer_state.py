"""Penalizer states: what penalties and bad words read of the requests' texts, kept on the device as the texts grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.plan import Chunk, Decode
from eagle_server.request import SamplingParams
from eagle_server.speculation.bad_words import WordBeginnings
from eagle_server.speculation.transforms import PenalizerState


@dataclass(frozen=True)
class _Counted:
    """A request's list of tokens, and how many of them are counted."""

    tokens: Sequence[int]
    length: int


class PenalizerStates:
    """Token counts by row of req_to_token, for requests with penalties only. Allocated when the first of them comes.

    They follow the scheduler's lists. Refused drafts, and tokens that were cut off, are in no list, so they are never
    counted. The memory is 5 bytes for each row and token of the vocabulary. The beginnings of bad words are kept on the
    host, and are compared with the texts in every cycle.
    """

    def __init__(self, requests: int, vocab_size: int, device: torch.device, steps: int = 0) -> None:
        """`steps`: the depth of the trees whose rows are drawn."""
        self._shape, self._device, self._steps = (requests, vocab_size), device, steps
        self._counts: tuple[Tensor, Tensor] | None = None  # float32 and bool [requests, vocab], see PenalizerState
        self._counted: dict[int, _Counted] = {}
        self._beginnings: dict[int, tuple[SamplingParams, WordBeginnings]] = {}

    def forget(self, req_pool_index: int) -> None:
        """The request has ended, or was preempted."""
        self._counted.pop(req_pool_index, None)
        self._beginnings.pop(req_pool_index, None)

    def state_of(self, scheduled: Sequence[Decode | Chunk]) -> PenalizerState:
        """The state of these requests' texts as they are now. Chunks must be the last of their prompts."""
        penalized = [request for request in scheduled if request.sampling.penalized]
        counts, prompts = self._update(penalized) if penalized else (None, None)
        return PenalizerState(counts, prompts, self._begun(scheduled))

    def _begun(self, scheduled: Sequence[Decode | Chunk]) -> Tensor | None:
        begun = []
        for number, request in enumerate(scheduled):
            if request.sampling.long_words[1].size:
                rows = self._beginnings_of(request).after(request.all_tokens)
                begun.append(np.column_stack([np.full(len(rows), number), rows]))
        return upload(np.concatenate(begun).T.copy(), self._device) if any(map(len, begun)) else None

    def _beginnings_of(self, request: Decode | Chunk) -> WordBeginnings:
        params, kept = request.sampling.params, self._beginnings.get(request.req_pool_index)
        if kept is None or kept[0] is not params:
            kept = self._beginnings[request.req_pool_index] = (
                params,
                WordBeginnings(*request.sampling.long_words, self._steps),
            )
        return kept[1]

    def _update(self, scheduled: Sequence[Decode | Chunk]) -> tuple[Tensor, Tensor]:
        """Count what the texts gained; the counts of these requests."""
        if self._counts is None:
            zeros = torch.zeros(self._shape, device=self._device)
            self._counts = zeros, torch.zeros_like(zeros, dtype=torch.bool)
        counts, prompts = self._counts
        known = [self._length_counted(request) for request in scheduled]
        fresh = [request.req_pool_index for request, length in zip(scheduled, known, strict=True) if length == 0]
        if fresh:
            indices = upload(fresh, self._device)
            counts.index_fill_(0, indices, 0.0)
            prompts.index_fill_(0, indices, value=False)
        both = [
            (request, length, request.sampling.prompt_length) for request, length in zip(scheduled, known, strict=True)
        ]
        one, true = counts.new_ones(()), prompts.new_ones(())
        for place in self._places(
            (request.req_pool_index, request.all_tokens[length:prompt]) for request, length, prompt in both
        ):
            prompts.index_put_(place, true)
        outputs = (
            (request.req_pool_index, request.all_tokens[max(length, prompt) :]) for request, length, prompt in both
        )
        for place in self._places(outputs):
            counts.index_put_(place, one, accumulate=True)
        self._counted.update(
            (request.req_pool_index, _Counted(request.all_tokens, len(request.all_tokens))) for request in scheduled
        )
        indices = upload([request.req_pool_index for request in scheduled], self._device)
        return counts.index_select(0, indices), prompts.index_select(0, indices)

    def _length_counted(self, request: Decode | Chunk) -> int:
        """How many of its tokens are counted. Another list belongs to another request, whatever it holds."""
        counted = self._counted.get(request.req_pool_index)
        return 0 if counted is None or counted.tokens is not request.all_tokens else counted.length

    def _places(self, lists: Iterable[tuple[int, Sequence[int]]]) -> list[tuple[Tensor, Tensor]]:
        """Rows and tokens, int64 [tokens] each; an empty list if there are no tokens."""
        pieces = [(index, np.array(tokens, dtype=np.int64)) for index, tokens in lists if tokens]
        if not pieces:
            return []
        rows = np.concatenate([np.full(len(tokens), index) for index, tokens in pieces])
        pairs = upload(np.stack([rows, np.concatenate([tokens for _, tokens in pieces])]), self._device)
        return [(pairs[0], pairs[1])]
