"""Logit transforms of the sampling parameters, before temperature and truncation, in the order of `SamplingParams`.

A transform holds the settings of the requests in a batch that use it, and edits rows of logits in place. An edit of
row j depends only on the row's text: the request's text so far and, in a tree, the tokens on the path from the root to
node j. So a row gives the same draw in a tree and in plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.plan import MASK_WORD, RequestSampling
from eagle_server.speculation.bad_words import ANY, PATH_START, short_words
from eagle_server.speculation.tree import Tree

_OFF = float("-inf")
_WORD_ROWS = 1 << 18  # rows times words compared at a time, about 50 bytes each
_PENALIZED_ROWS = 256  # rows of logits at a time; penalties take about 20 bytes per row and vocabulary entry


@dataclass(frozen=True)
class PenalizerState:
    """The state of the text so far that transforms read, in the order of the batch.

    Counts and prompts are for `penalized` requests.
    """

    counts: Tensor | None = None  # float32 [h, vocab], how often each token occurs in the output
    prompts: Tensor | None = None  # bool [h, vocab], whether it occurs in the prompt
    # int64 [3 + steps, matches]: requests, then `WordBeginnings.after` for their texts
    begun: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Positions and texts of rows of logits [bs, rows, vocab].

    Row j is node j of `tree`: its text is the text so far, then the drafted tokens on the path to the node. Without a
    tree every row's text is the text so far.
    """

    positions: Tensor  # int64 [bs, rows], positions of the tokens to draw
    tree: Tree | None
    penalizer_state: PenalizerState


class Transform(Protocol):
    """The effect of one sampling parameter on logits."""

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Edit logits float32 [bs, rows, vocab] in place."""
        ...


@dataclass(frozen=True)
class Masks:
    """-inf for tokens that the grammar forbids: token masks of the requests with a grammar."""

    requests: tuple[int, ...]
    bits: Tensor  # int32 [len(requests), rows, vocab / 32], the lowest bit first

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """One request at a time, because the unpacked bits need memory."""
        tokens = torch.arange(logits.shape[2], device=logits.device)
        for request, bits in zip(self.requests, self.bits, strict=True):
            logits[request].masked_fill_(~allowed_by(bits, tokens), _OFF)


def allowed_by(bits: Tensor, tokens: Tensor) -> Tensor:
    """bool [rows, n]: whether token masks int32 [rows, vocab / 32] allow tokens int64 [n]."""
    word, place = tokens // MASK_WORD, (tokens % MASK_WORD).to(torch.int32)
    return (bits.index_select(1, word) >> place & 1) != 0


@dataclass(frozen=True)
class LogitBias:
    """l + bias for each entry of logit_bias. l - inf for tokens that are not in allowed_token_ids, and for bad words of
    one token.
    """

    requests: Tensor  # int64 [b]
    bias: Tensor  # float32 [b, width], zero for all later tokens
    restricted: Tensor | None  # int64 [a], requests with allowed_token_ids: no later token is one of them

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> LogitBias | None:
        chosen = [(i, s) for i, s in enumerate(settings) if s.biases[0].size or s.allowed is not None]
        if not chosen:
            return None
        entries = [setting.biases for _, setting in chosen]
        tokens, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        masks = [(n, s.allowed) for n, (_, s) in enumerate(chosen) if s.allowed is not None]
        width = max(int(tokens.max(initial=-1)) + 1, *(len(mask) for _, mask in masks), 0)
        bias = torch.zeros((len(chosen), width), device=device)
        if masks:
            forbidden = np.zeros((len(chosen), width), dtype=np.bool_)
            for number, mask in masks:
                forbidden[number] = True
                forbidden[number, : len(mask)] = ~mask
            bias.masked_fill_(upload(forbidden, device, torch.bool), _OFF)
        numbers = np.repeat(np.arange(len(chosen)), [len(ids) for ids, _ in entries])
        place = upload(np.stack([numbers, tokens]), device)
        bias.index_put_((place[0], place[1]), upload(values, device, torch.float32), accumulate=True)
        restricted = upload([chosen[number][0] for number, _ in masks], device) if masks else None
        return cls(upload([i for i, _ in chosen], device), bias, restricted)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        width = self.bias.shape[1]
        logits[:, :, :width].index_add_(0, self.requests, self.bias[:, None].expand(-1, logits.shape[1], -1))
        if self.restricted is not None:
            logits[:, :, width:].index_fill_(0, self.restricted, _OFF)


@dataclass(frozen=True)
class BadWords:
    """l - inf for the last token of a word if the row's text (prompt and output) ends with the word's other tokens.

    Words that begin in the text so far are found on the host (`PenalizerState.begun`). `words` may begin on a drafted
    path. `columns` has, for each request, as many entries as words may share a last token but one.
    """

    steps: int
    words: Tensor | None  # int64 [1 + longest, words], see `short_words`; before them their `_key`, which sorts them
    columns: Tensor | None  # int64 [2, columns]: request, number among the words with the same key

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device, steps: int) -> BadWords | None:
        chosen = [(i, *s.long_words) for i, s in enumerate(settings) if s.long_words[1].size]
        if not chosen:
            return None
        longest = max(int(lengths[lengths <= steps + 1].max(initial=1)) for _, _, lengths in chosen)
        if longest == 1:
            return cls(steps, None, None)
        short = [(i, *short_words(tokens, lengths, longest)) for i, tokens, lengths in chosen]
        columns = [np.stack([np.full(most, i), np.arange(most)]) for i, _, most in short]
        words = [np.column_stack([_key(i, words[:, 1]), words]) for i, words, _ in short]
        table = np.concatenate(words).T.copy()
        return cls(steps, upload(table, device), upload(np.concatenate(columns, axis=1), device))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        latest = latest_drafted(rows.tree, logits.shape[:2], self.steps + 1, logits.device)
        if rows.penalizer_state.begun is not None:
            step = max(1, _WORD_ROWS // logits.shape[1])
            for requests, last, *before in zip(*(part.split(step) for part in rows.penalizer_state.begun), strict=True):
                ends = _ends_with(latest, requests, [tokens[:, None] for tokens in before])
                _add(logits, requests, last[:, None], torch.where(ends, _OFF, 0.0))
        if self.words is not None and rows.tree is not None:
            self._apply_short(logits, latest)

    def _apply_short(self, logits: Tensor, latest: Sequence[Tensor]) -> None:
        """Compare each row with the words whose last token but one is the row's newest token."""
        assert self.words is not None and self.columns is not None
        keys, last, _, *before = self.words
        key = _key(torch.arange(len(logits), device=logits.device)[:, None], latest[0])  # [bs, rows]
        first = torch.searchsorted(keys, key)
        for requests, number in self.columns.split(max(1, _WORD_ROWS // logits.shape[1]), dim=1):
            place = (first.index_select(0, requests) + number[:, None]).clamp(max=len(keys) - 1)  # [columns, rows]
            ends = keys.take(place) == key.index_select(0, requests)
            ends &= _ends_with(latest[1:], requests, [tokens.take(place) for tokens in before])
            _add(logits, requests, last.take(place), torch.where(ends, _OFF, 0.0))


@dataclass(frozen=True)
class MinTokens:
    """l - inf for stop tokens at positions before `allowed_from`."""

    requests: Tensor  # int64 [entries]
    tokens: Tensor  # int64 [entries]
    allowed_from: Tensor  # int64 [entries], the first position where the token may be drawn

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> MinTokens | None:
        chosen = [(i, s) for i, s in enumerate(settings) if s.stop_ids]
        if not chosen:
            return None
        counts = [len(s.stop_ids) for _, s in chosen]
        tokens = np.concatenate([s.early_stop_ids for _, s in chosen])
        requests, allowed_from = (
            np.repeat(n, counts) for n in zip(*((i, s.allowed_from) for i, s in chosen), strict=True)
        )
        return cls(*upload(np.stack([requests, tokens, allowed_from]), device))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        early = rows.positions.index_select(0, self.requests) < self.allowed_from[:, None]
        _add(logits, self.requests, self.tokens[:, None], torch.where(early, _OFF, 0.0))


@dataclass(frozen=True)
class Penalties:
    """Repetition penalty r, frequency penalty f and presence penalty p. n is the token's count in the output.

    For tokens in prompt or output: l' = l / r if l > 0, else l * r. For other tokens: l' = l. The result is
    l' - f * n - p * [n > 0].
    """

    requests: Tensor  # int64 [h]
    strength: Tensor  # float32 [3, h]: r, f and p

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> Penalties | None:
        chosen = [(i, setting) for i, setting in enumerate(settings) if setting.penalized]
        if not chosen:
            return None
        params = [setting.params for _, setting in chosen]
        strength = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        return cls(upload([i for i, _ in chosen], device), upload(strength, device, torch.float32).T)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """A few requests at a time, because intermediate results need memory."""
        counts, prompts = rows.penalizer_state.counts, rows.penalizer_state.prompts
        assert counts is not None and prompts is not None
        step = max(1, _PENALIZED_ROWS // logits.shape[1])
        parts = (part.split(step) for part in (self.requests, self.strength.T, counts, prompts))
        for requests, strength, count, prompt in zip(*parts, strict=True):
            unpenalized = logits.index_select(0, requests)
            penalized = _penalized(unpenalized, count[:, None], prompt[:, None], strength)
            if rows.tree is not None:
                _count_drafted(penalized, unpenalized, rows.tree.rows_of(requests), count, prompt, strength)
            logits.index_copy_(0, requests, penalized)


def transforms_of(settings: Sequence[RequestSampling], device: torch.device, steps: int) -> tuple[Transform, ...]:
    """The transforms of a batch, in order. The grammars' `Masks` come before them; they are new in every cycle.

    `steps`: the depth of the deepest row of a tree.
    """
    transforms: tuple[Transform | None, ...] = (
        LogitBias.of(settings, device),
        BadWords.of(settings, device, steps),
        MinTokens.of(settings, device),
        Penalties.of(settings, device),
    )
    return tuple(transform for transform in transforms if transform is not None)


def latest_drafted(tree: Tree | None, shape: Sequence[int], width: int, device: torch.device) -> list[Tensor]:
    """The drafted tokens on each row's path, newest first, and PATH_START before the first one.

    A list of `width` tensors, int64 [bs, rows]; `shape` is (bs, rows).
    """
    if tree is None:
        return [torch.full(tuple(shape), PATH_START, device=device)] * width
    tokens, place, columns = tree.tokens.clone(), torch.arange(shape[1], device=device).expand(*shape), []
    tokens[:, 0] = PATH_START
    for _ in range(width):
        columns.append(tokens.gather(1, place))
        place = tree.parents.gather(1, place).clamp(min=0)
    return columns


def _key(request: Any, token: Any) -> Any:
    """A request's number and a token in one integer, so that both are looked up at once."""
    return request * (1 << 32) + token


def _ends_with(latest: Sequence[Tensor], requests: Tensor, before: Sequence[Tensor]) -> Tensor:
    """bool [n, rows]: whether the rows of requests int64 [n] have the tokens `before`, newest first, each [n, rows]."""
    ends = torch.ones((len(requests), latest[0].shape[1]), dtype=torch.bool, device=requests.device)
    for tokens, wanted in zip(latest, before, strict=False):
        ends &= (tokens.index_select(0, requests) == wanted) | (wanted == ANY)
    return ends


def _penalized(logits: Tensor, counts: Tensor, prompts: Tensor, strength: Tensor) -> Tensor:
    """The formula of `Penalties` for logits [n, rows, m]. counts and prompts broadcast to them; strength is [n, 3]."""
    repetition, frequency, presence = strength.T[:, :, None, None]
    occurs = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    subtracted: Tensor = frequency * counts + presence * occurs
    return torch.where(prompts | occurs, scaled, logits) - subtracted


def _count_drafted(
    penalized: Tensor, unpenalized: Tensor, tree: Tree, counts: Tensor, prompts: Tensor, strength: Tensor
) -> None:
    """Add the tokens on each row's path to the counts, and recompute penalized [n, rows, vocab] for them in place.

    Only the rows - 1 drafted tokens of a tree can have higher counts than in the output so far. A token that is not on
    a row's path keeps its value in that row.
    """
    tokens = tree.tokens[:, 1:]  # [n, rows - 1]
    place = tokens.clamp(min=0)
    same = tokens[:, :, None] == place[:, None]  # padding (-1) equals no token
    more = tree.mask[:, :, 1:].float() @ same.float()  # [n, rows, rows - 1]
    everywhere = place[:, None].expand(-1, unpenalized.shape[1], -1)
    total = counts.gather(1, place)[:, None] + more
    values = _penalized(unpenalized.gather(2, everywhere), total, prompts.gather(1, place)[:, None], strength)
    penalized.scatter_(2, everywhere, values)


def _add(logits: Tensor, requests: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values float32 [n, rows] to the logits of tokens int64 [n, rows] in the rows of requests int64 [n].

    Tokens [n, 1] are the same in all rows.
    """
    rows = torch.arange(logits.shape[1], device=logits.device)
    logits.index_put_((requests[:, None], rows, tokens), values, accumulate=True)
