"""How often tokens occur in what is trained on, and the draft vocabularies that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WANTED_COVERAGE = 0.995  # of generated tokens; what lies outside a draft vocabulary is never drafted
_AROUND = 4  # the table has the powers of two from a quarter of the asked size to four times it


@dataclass(frozen=True)
class TokenCounts:
    """Occurrences of each id, int64 [V]. special: ids that every draft vocabulary has."""

    occurrences: np.ndarray
    special: frozenset[int] = frozenset()

    @classmethod
    def of(cls, streams: Iterable[np.ndarray], vocab: int, special: Iterable[int] = ()) -> TokenCounts:
        """The tokens of streams of ids below `vocab`. Special ids from `vocab` on do not count."""
        occurrences = np.zeros(vocab, dtype=np.int64)
        for stream in streams:
            np.add.at(occurrences, stream, 1)
        return cls(occurrences, frozenset(token for token in special if 0 <= token < vocab))

    @property
    def vocab(self) -> int:
        return len(self.occurrences)

    @property
    def total(self) -> int:
        """Tokens that were counted."""
        return int(self.occurrences.sum())

    def draft_ids(self, count: int) -> Tensor:
        """The special ids and the most frequent ids, `count` together; sorted int64 [count].

        Of ids that are equally frequent the lower ones are taken, which tokenizers have learned earlier.

        Raises:
            ValueError: there are more special ids, or fewer ids at all.
        """
        if not len(self.special) <= count <= self.vocab:
            raise ValueError(
                f"a draft vocabulary of {count}: {len(self.special)} special tokens alone, and all {self.vocab} tokens "
                "of the model, are the bounds"
            )
        return torch.from_numpy(np.sort(self._order[:count]).astype(np.int64))

    def coverage(self, draft_ids: Tensor) -> float:
        """The share of counted tokens that a draft vocabulary has."""
        return float(self.occurrences[draft_ids.cpu().numpy()].sum() / max(1, self.total))

    def size_for(self, share: float) -> int:
        """The smallest `count` whose `draft_ids` have this share of the counted tokens."""
        covered = np.cumsum(self.occurrences[self._order])
        return max(len(self.special), 1 + int(np.searchsorted(covered, share * covered[-1])))

    def table(self, count: int) -> str:
        """The coverage of `count` tokens, of powers of two around it, and the size for `WANTED_COVERAGE`."""
        powers = {1 << bits for bits in range(self.vocab.bit_length())}
        near = {size for size in powers if count <= size * _AROUND and size <= count * _AROUND}
        sizes = sorted({count, *(size for size in near if size >= len(self.special))})
        lines = [f"{size:>8} tokens: {100 * self.coverage(self.draft_ids(size)):6.2f} %" for size in sizes]
        enough = f"{100 * WANTED_COVERAGE} % takes {self.size_for(WANTED_COVERAGE)} tokens"
        seen = f"{self.total} tokens were counted, {np.count_nonzero(self.occurrences)} different ones"
        return "\n".join([*lines, f"{enough}; {seen}, and {len(self.special)} special tokens are in every size"])

    @property
    def _order(self) -> np.ndarray:
        """All ids: the special ones, then the most frequent ones."""
        weights = self.occurrences.astype(np.int64)
        weights[sorted(self.special)] = np.iinfo(np.int64).max
        return np.argsort(-weights, kind="stable")
