"""Token rows as training data: packed into windows, some conversations held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eagle_tools.training.fingerprint import fingerprint
from eagle_tools.training.packing import Packing, chain_rates, served_length
from eagle_tools.training.rows.feature_files import CapturedFeatures
from eagle_tools.training.rows.token_rows import TokenRow, read_token_rows
from eagle_tools.training.token_counts import TokenCounts

HELD_OUT_PER_MILLE = 50
EVALUATED_WINDOWS = 32  # at most, for an evaluation during a training
_SEED = 3
# Of a window [1, length + 1]: its loss, and by step and the row where a chain begins whether the draft is right and
# whether it counts, bool [steps, 1, chains].
Score = Callable[[Tensor, Packing], tuple[Tensor, Tensor, Tensor]]


class CutRow(NamedTuple):
    """A row, cut to a length. `number`: its place among all rows that were read."""

    ids: np.ndarray  # int64 [tokens]
    mask: np.ndarray  # bool [tokens]
    id: str = ""
    gen: int = 0
    number: int = 0

    @property
    def key(self) -> str:
        """A hash of all but the number."""
        return fingerprint([f"{self.id} {self.gen}".encode(), self.ids.tobytes(), self.mask.tobytes()])


@dataclass(frozen=True)
class RowSet:
    """Rows cut to `length` + 1 tokens and packed into windows.

    counts: how often each supervised id is trained on.
    key: a hash of the rows, the vocabulary and the length. features: of the rows; None: they are computed.
    """

    train: Sequence[Sequence[CutRow]]
    held_out: Sequence[Sequence[CutRow]]
    counts: TokenCounts
    length: int
    key: str
    features: CapturedFeatures | None = None

    def window(self, step: int, windows: int) -> tuple[Tensor, Packing]:
        """The windows [windows, length + 1] of one step. All are seen once before any is seen again."""
        count = len(self.train)
        chosen = []
        for place in range(step * windows, (step + 1) * windows):
            epoch, index = divmod(place, count)
            chosen.append(self.train[_epoch_order(epoch, count)[index]])
        return packed(chosen, self.length, self.features)

    def evaluate(self, score: Score, *, every_row: bool = True) -> dict[str, float]:
        """The loss on held-out answers, how often each step is right, and the accept length of chains.

        every_row: `score` has every row as the beginning of a chain. Then the length is that of a server that writes
        the answers; else the mean over the chains that there are.
        """
        losses, hits, counted = [], [], []
        for window in self.held_out[:EVALUATED_WINDOWS]:
            tokens, packing = packed([window], self.length, self.features)
            loss, right, counts = score(tokens, packing)
            losses.append(float(loss))
            hits.append(right.cpu())
            counted.append(counts.cpu())
        found, counts = torch.cat(hits, dim=1), torch.cat(counted, dim=1)
        rates, length = chain_rates(found, counts)
        if every_row:
            length = served_length(found, counts)
        numbers = {f"answers step {step + 1}": rate for step, rate in enumerate(rates)}
        return {"held-out loss": float(np.mean(losses)), **numbers, "answers accept length": length}


@lru_cache(maxsize=2)
def _epoch_order(epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((_SEED, epoch)).permutation(count)


def read_row_set(files: Sequence[Path], vocab_size: int, special: Iterable[int], length: int) -> RowSet:
    """The rows of files of token rows, for windows of `length` + 1 tokens, see `kept_rows`.

    Raises:
        RowError: a row is broken.
        ValueError: too few rows are left.
    """
    return _row_set(kept_rows(token_rows(files, vocab_size), length), vocab_size, special, length)


def captured_row_set(features: CapturedFeatures, special: Iterable[int], length: int) -> RowSet:
    """The rows of a capture, with their features.

    Raises:
        ValueError: too few rows are left.
    """
    return _row_set(kept_rows(features.rows(), length), features.facts.vocab_size, special, length, features)


def token_rows(files: Sequence[Path], vocab_size: int) -> Iterator[TokenRow]:
    """The rows of files of token rows, with a progress bar for each.

    Raises:
        RowError: a row is broken.
    """
    for file in files:
        yield from tqdm(read_token_rows(file, vocab_size), desc=file.name, unit="row")


def kept_rows(rows: Iterable[TokenRow], length: int) -> tuple[list[CutRow], str]:
    """Rows to train on, and what was done to the others.

    Rows of more than `length` + 1 tokens are cut at their end. Rows without two supervised tokens in a row teach
    nothing and are left out.
    """
    kept, cut, left_out = list[CutRow](), 0, 0
    for number, row in enumerate(rows):
        cut += len(row.input_ids) > length + 1
        ids = np.asarray(row.input_ids[: length + 1], dtype=np.int64)
        mask = np.asarray(row.loss_mask[: length + 1], dtype=bool)
        if (mask[1:-1] & mask[2:]).any():
            kept.append(CutRow(ids, mask, row.id, row.gen, number))
        else:
            left_out += 1
    return kept, f"{cut} cut at {length + 1} tokens, {left_out} left out: no two generated tokens in a row"


def _row_set(
    read: tuple[Sequence[CutRow], str],
    vocab_size: int,
    special: Iterable[int],
    length: int,
    features: CapturedFeatures | None = None,
) -> RowSet:
    """Hold some conversations out, and pack the rest."""
    rows, others = read
    parts: dict[bool, list[CutRow]] = {False: [], True: []}
    for row in rows:
        parts[_is_held_out(row.id)].append(row)
    if not parts[True] and len(parts[False]) > 1:
        parts[True].append(parts[False].pop())
    if not parts[True] or not parts[False]:
        raise ValueError(f"too few rows: {len(parts[False])} to train on, and {len(parts[True])} held out")
    counts = TokenCounts.of((row.ids[row.mask] for row in parts[False]), vocab_size, special)
    print(f"{len(rows)} rows, {len(parts[True])} of them held out; {counts.total} tokens to train on; {others}")
    digest = [row.key.encode() for row in rows]
    captured = [] if features is None else [features.facts.text().encode()]
    key = fingerprint([*digest, str(length).encode(), str(vocab_size).encode(), *captured])
    train, held_out = (_packs(parts[which], length + 1) for which in (False, True))
    return RowSet(train, held_out, counts, length, key, features)


def packed(
    windows: Sequence[Sequence[CutRow]], length: int, features: CapturedFeatures | None = None
) -> tuple[Tensor, Packing]:
    """Windows of rows as ids [windows, length + 1] and their packing. Id 0 pads them. features: of the rows."""
    tokens = np.zeros((len(windows), length + 1), dtype=np.int64)
    documents = np.full(tokens.shape, -1, dtype=np.int64)
    supervised = np.zeros(tokens.shape, dtype=bool)
    captured = None if features is None else features.zeros(*tokens.shape)
    for number, rows in enumerate(windows):
        begin = 0
        for document, row in enumerate(rows):
            place = slice(begin, begin + len(row.ids))
            tokens[number, place], documents[number, place], supervised[number, place] = row.ids, document, row.mask
            if features is not None and captured is not None:
                captured[number, place] = features.read(row.number, len(row.ids))
            begin = place.stop
    return torch.from_numpy(tokens), Packing(torch.from_numpy(documents), torch.from_numpy(supervised), captured)


def _packs(rows: Sequence[CutRow], capacity: int) -> list[list[CutRow]]:
    """The rows in windows of at most `capacity` tokens, in a fixed random order; each goes where it fits best."""
    packs: list[list[CutRow]] = []
    room: list[list[int]] = [[] for _ in range(capacity + 1)]  # packs by their free tokens
    for index in np.random.default_rng(_SEED).permutation(len(rows)):
        row = rows[index]
        free = next((size for size in range(len(row.ids), capacity + 1) if room[size]), None)
        if free is None:
            packs.append([row])
            room[capacity - len(row.ids)].append(len(packs) - 1)
            continue
        pack = room[free].pop()
        packs[pack].append(row)
        room[free - len(row.ids)].append(pack)
    return packs


def _is_held_out(conversation: str) -> bool:
    """Whether a conversation is held out, with all of its answers."""
    digest = hashlib.sha256(conversation.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE
