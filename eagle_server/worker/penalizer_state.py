"""What penalties and bad words read of the requests' texts, kept on the device as the texts grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.plan import Chunk, Decode
from eagle_server.speculation.transforms import BEGINNING, PenalizerState


@dataclass(frozen=True)
class _Reading:
    """The list of tokens that a row's counts were made from, and how many of them."""

    text: Sequence[int]
    length: int


class PenalizerStates:
    """Counts by row of req_to_token, of requests with penalties only; made when the first of them comes.

    They follow the scheduler's lists, so what was drafted in vain, cut off or preempted is never counted. They take 5
    bytes for each row and token of the vocabulary.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape, self._device = (rows, vocab_size), device
        self._counts: tuple[Tensor, Tensor] | None = None  # float32 and bool [rows, vocab], see PenalizerState
        self._readings: dict[int, _Reading] = {}

    def forget(self, row: int) -> None:
        """The request in this row has ended, or was preempted."""
        self._readings.pop(row, None)

    def of(self, turns: Sequence[Decode | Chunk]) -> PenalizerState:
        """Of the texts of these turns, as they are now; chunks must be the last of their prompts."""
        penalized = [turn for turn in turns if turn.sampling.penalized]
        looking_back = [turn for turn in turns if turn.sampling.lookback]
        if not penalized and not looking_back:
            return PenalizerState()
        counts, prompts = self._counted(penalized) if penalized else (None, None)
        return PenalizerState(counts, prompts, self._tails(looking_back) if looking_back else None)

    def _tails(self, turns: Sequence[Decode | Chunk]) -> Tensor:
        width = max(turn.sampling.lookback for turn in turns)
        last = [list(turn.text[-width:]) for turn in turns]
        return upload([[BEGINNING] * (width - len(tail)) + tail for tail in last], self._device)

    def _counted(self, turns: Sequence[Decode | Chunk]) -> tuple[Tensor, Tensor]:
        if self._counts is None:
            zeros = torch.zeros(self._shape, device=self._device)
            self._counts = zeros, torch.zeros_like(zeros, dtype=torch.bool)
        counts, prompts = self._counts
        known = {turn.row: self._known(turn) for turn in turns}
        fresh = [row for row, length in known.items() if length == 0]
        if fresh:
            begun = upload(fresh, self._device)
            counts.index_fill_(0, begun, 0.0)
            prompts.index_fill_(0, begun, value=False)
        one, true = counts.new_ones(()), prompts.new_ones(())
        for written in self._places((t.row, t.text[known[t.row] : t.sampling.prompt_length]) for t in turns):
            prompts.index_put_(written, true)
        for written in self._places((t.row, t.text[max(known[t.row], t.sampling.prompt_length) :]) for t in turns):
            counts.index_put_(written, one, accumulate=True)
        self._readings.update((turn.row, _Reading(turn.text, len(turn.text))) for turn in turns)
        rows = upload([turn.row for turn in turns], self._device)
        return counts.index_select(0, rows), prompts.index_select(0, rows)

    def _known(self, turn: Decode | Chunk) -> int:
        """How many tokens are counted already. Another list is another request's, whatever it holds."""
        reading = self._readings.get(turn.row)
        return 0 if reading is None or reading.text is not turn.text else reading.length

    def _places(self, texts: Iterable[tuple[int, Sequence[int]]]) -> list[tuple[Tensor, Tensor]]:
        """Rows and tokens, int64 [tokens] each; nothing if there are none."""
        pairs = [(row, token) for row, tokens in texts for token in tokens]
        if not pairs:
            return []
        rows, tokens = upload(pairs, self._device).T
        return [(rows, tokens)]
