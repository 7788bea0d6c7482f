"""Scores with noise by the native kernels: the twins of `gumbel`, `draw_tokens` and `topk_logprobs`."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from eagle_server.ops.native.library import empty, functions, pointer, session
from eagle_server.ops.native.structs import ScoringStruct


class NativeScoring:
    """Rows of logits float32 [n, vocab] (None: only their noise is wanted), and whose noise they get.

    keys, positions: int64 [n]; temperature: float32 [n]; None: no row gets noise. ids: int64 [vocab], see `gumbel`.
    """

    def __init__(
        self,
        logits: Tensor | None,
        vocab_size: int,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
        temperature: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> None:
        if logits is not None and (logits.dtype != torch.float32 or logits.stride(1) != 1):
            logits = logits.float().contiguous()
        given = [each if each is None else each.contiguous() for each in (keys, positions, temperature, ids)]
        assert all(each is None or each.dtype == torch.int64 for each in (given[0], given[1], given[3]))
        self._tensors = logits, *given  # keeps them alive
        rows = len(next(each for each in self._tensors if each is not None))
        stride = 0 if logits is None else logits.stride(0)
        pointers = (None if each is None else pointer(each) for each in self._tensors)
        self.rows, self.vocab_size = rows, vocab_size
        self.struct = ScoringStruct(*pointers, stride, rows, vocab_size)

    def noise(self) -> Tensor:
        """float32 [n, vocab]"""
        out = empty(self.rows, self.vocab_size)
        functions().eagle_gumbel(session(), byref(self.struct), pointer(out))
        return out

    def draw(self) -> tuple[Tensor, Tensor]:
        """See `draw_tokens`."""
        tokens, scores = torch.empty(self.rows, dtype=torch.int64), empty(self.rows)
        functions().eagle_draw(session(), byref(self.struct), pointer(tokens), pointer(scores))
        return tokens, scores

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """See `topk_logprobs`."""
        assert k <= self.vocab_size
        logp, tokens = empty(self.rows, k), torch.empty(self.rows, k, dtype=torch.int64)
        functions().eagle_best_tokens(session(), byref(self.struct), k, pointer(logp), pointer(tokens))
        return logp, tokens


def draw_by_rows(logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """See `draw_tokens`."""
    keys, temperature = of_rows(len(logits), keys, temperature)
    return NativeScoring(logits, logits.shape[1], keys, positions, temperature).draw()


def of_rows(count: int, keys: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and temperatures of `count` rows, by row. Requests have equally many rows, which follow each other."""
    rows = count // max(1, len(keys))
    return (keys, temperature) if rows == 1 else (keys.repeat_interleave(rows), temperature.repeat_interleave(rows))


def is_read(logits: Tensor, *_: Any, **__: Any) -> bool:
    """Whether the kernels read logits of this dtype."""
    return logits.dtype in (torch.float32, torch.bfloat16)
