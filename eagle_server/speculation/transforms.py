"""Logit transforms of the sampling parameters, before temperature and truncation, in the order of `SamplingParams`.

A transform holds the settings of those requests in a batch that use it, and edits rows of logits in place. An edit of
row j depends only on the row's text: the request's text so far and, in a tree, the tokens on the path from the root to
node j. So a row gives the same draw in a tree and in plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.plan import MASK_WORD, RequestSampling

_OFF = float("-inf")
BEGINNING = -2  # in a tail: the entries before the first token of the text
_ANY = -1  # in a bad word: matches every token
_PENALIZED_ROWS = 256  # rows of logits at a time; penalties take about 20 bytes per row and vocabulary entry


@dataclass(frozen=True)
class Paths:
    """The drafted tokens of each row: row j's text is the text so far, then the tokens of its ancestors and its own.

    Row 0 is the root. Its token is the last token of the text so far.
    """

    tokens: Tensor  # int64 [bs, rows], -1: padding, which is never an ancestor of another row
    parents: Tensor  # int64 [bs, rows], -1 at row 0
    ancestors: Tensor  # bool [bs, rows, rows], ancestors and self

    def of(self, requests: Tensor) -> Paths:
        """The paths of some requests, int64 [n]."""
        return Paths(*(part.index_select(0, requests) for part in (self.tokens, self.parents, self.ancestors)))


@dataclass(frozen=True)
class PenalizerState:
    """What transforms read of the text so far, in the order of the batch.

    Counts and prompts are for `penalized` requests, tails for requests with a `lookback`.
    """

    counts: Tensor | None = None  # float32 [h, vocab], how often each token occurs in the output
    prompts: Tensor | None = None  # bool [h, vocab], whether it occurs in the prompt
    tails: Tensor | None = None  # int64 [w, longest lookback], the last tokens, newest last, BEGINNING before the first


@dataclass(frozen=True)
class Rows:
    """Positions and texts of rows of logits [bs, rows, vocab]. Without `paths` every row's text is the text so far."""

    positions: Tensor  # int64 [bs, rows], positions of the tokens to draw
    paths: Paths | None
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
    """l + bias for each entry of logit_bias. l - inf for each bad word of one token."""

    requests: Tensor  # int64 [entries]
    tokens: Tensor  # int64 [entries]
    values: Tensor  # float32 [entries]

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> LogitBias | None:
        entries = [
            (request, token, value)
            for request, setting in enumerate(settings)
            for token, value in (
                *setting.params.logit_bias,
                *((w[0], _OFF) for w in setting.params.bad_words if len(w) == 1),
            )
        ]
        if not entries:
            return None
        requests, tokens, values = zip(*entries, strict=True)
        ids = upload([requests, tokens], device)
        return cls(ids[0], ids[1], upload(values, device, torch.float32))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        _add(logits, self.requests, self.tokens, self.values[:, None].expand(-1, logits.shape[1]))


@dataclass(frozen=True)
class AllowedTokens:
    """l - inf for tokens that are not in allowed_token_ids."""

    requests: Tensor  # int64 [a]
    entries: Tensor  # int64 [2, entries], indices into `requests`, and tokens

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> AllowedTokens | None:
        requests = [i for i, setting in enumerate(settings) if setting.params.allowed_token_ids is not None]
        if not requests:
            return None
        entries = [(n, t) for n, i in enumerate(requests) for t in settings[i].params.allowed_token_ids or ()]
        return cls(upload(requests, device), upload(entries, device).view(-1, 2).T)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        shut = torch.full((len(self.requests), logits.shape[2]), _OFF, device=logits.device)
        shut.index_put_((self.entries[0], self.entries[1]), torch.zeros((), device=logits.device))
        logits.index_add_(0, self.requests, shut[:, None].expand(-1, logits.shape[1], -1))


@dataclass(frozen=True)
class BadWords:
    """l - inf for the last token of a word if the row's text (prompt and output) ends with the word's other tokens."""

    requests: Tensor  # int64 [w], requests with words of several tokens
    words: Tensor  # int64 [3, words]: index into `requests`, request, last token
    beginnings: Tensor  # int64 [words, longest lookback], the other tokens, newest first, then -1

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> BadWords | None:
        requests = [i for i, setting in enumerate(settings) if setting.lookback]
        if not requests:
            return None
        width = max(settings[i].lookback for i in requests)
        words = [(n, i, word) for n, i in enumerate(requests) for word in settings[i].params.bad_words if len(word) > 1]
        ids = upload([(n, i, word[-1]) for n, i, word in words], device).T
        beginnings = [[*word[-2::-1], *[_ANY] * (width - len(word) + 1)] for _, _, word in words]
        return cls(upload(requests, device), ids, upload(beginnings, device))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        assert rows.penalizer_state.tails is not None
        paths = None if rows.paths is None else rows.paths.of(self.requests)
        latest = latest_tokens(rows.penalizer_state.tails, paths).index_select(0, self.words[0])  # [words, rows, width]
        wanted = self.beginnings[:, None]
        completes = ((latest == wanted) | (wanted == _ANY)).all(dim=2)
        _add(logits, self.words[1], self.words[2], torch.where(completes, _OFF, 0.0))


@dataclass(frozen=True)
class MinTokens:
    """l - inf for stop tokens at positions before `allowed_from`."""

    requests: Tensor  # int64 [entries]
    tokens: Tensor  # int64 [entries]
    allowed_from: Tensor  # int64 [entries], the first position where the token may be drawn

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> MinTokens | None:
        entries = [(i, token, s.allowed_from) for i, s in enumerate(settings) for token in s.stop_ids]
        return cls(*upload(entries, device).T) if entries else None

    def apply(self, logits: Tensor, rows: Rows) -> None:
        early = rows.positions.index_select(0, self.requests) < self.allowed_from[:, None]
        _add(logits, self.requests, self.tokens, torch.where(early, _OFF, 0.0))


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
            given = logits.index_select(0, requests)
            penalized = _penalized(given, count[:, None], prompt[:, None], strength)
            if rows.paths is not None:
                _count_paths(penalized, given, rows.paths.of(requests), count, prompt, strength)
            logits.index_copy_(0, requests, penalized)


def transforms_of(settings: Sequence[RequestSampling], device: torch.device) -> tuple[Transform, ...]:
    """The transforms of a batch, in order. The grammars' `Masks` come before them; they are new in every cycle."""
    found: tuple[Transform | None, ...] = (
        LogitBias.of(settings, device),
        AllowedTokens.of(settings, device),
        BadWords.of(settings, device),
        MinTokens.of(settings, device),
        Penalties.of(settings, device),
    )
    return tuple(transform for transform in found if transform is not None)


def latest_tokens(tails: Tensor, paths: Paths | None) -> Tensor:
    """The last `width` tokens of each row's text, newest first: int64 [bs, rows, width].

    tails int64 [bs, width] are the last tokens of the text so far, newest last.
    """
    bs, width = tails.shape
    chain = torch.arange(width, device=tails.device)
    if paths is None:
        return tails.flip(1)[:, None]
    # Put the tail before the tree as a chain that ends in the root. Then one walk over parents finds all latest tokens.
    tokens = torch.cat([tails, paths.tokens[:, 1:]], dim=1)
    parents = torch.cat([(chain - 1).clamp(min=0).expand(bs, -1), paths.parents[:, 1:] + (width - 1)], dim=1)
    place = torch.arange(width - 1, tokens.shape[1], device=tails.device).expand(bs, -1)  # [bs, rows]
    found = []
    for _ in range(width):
        found.append(tokens.gather(1, place))
        place = parents.gather(1, place)
    return torch.stack(found, dim=2)


def _penalized(logits: Tensor, counts: Tensor, prompts: Tensor, strength: Tensor) -> Tensor:
    """The formula of `Penalties` for logits [n, rows, m]. counts and prompts broadcast to them; strength is [n, 3]."""
    repetition, frequency, presence = strength.T[:, :, None, None]
    occurs = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    subtracted: Tensor = frequency * counts + presence * occurs
    return torch.where(prompts | occurs, scaled, logits) - subtracted


def _count_paths(
    penalized: Tensor, given: Tensor, paths: Paths, counts: Tensor, prompts: Tensor, strength: Tensor
) -> None:
    """Add the tokens on each row's path to the counts, and recompute penalized [n, rows, vocab] for them in place.

    Only the rows - 1 drafted tokens of a tree can have higher counts than in the output so far. A token that is not on
    a row's path keeps its value in that row.
    """
    tokens = paths.tokens[:, 1:]  # [n, rows - 1]
    place = tokens.clamp(min=0)
    same = tokens[:, :, None] == place[:, None]  # padding (-1) equals no token
    more = paths.ancestors[:, :, 1:].float() @ same.float()  # [n, rows, rows - 1]
    everywhere = place[:, None].expand(-1, given.shape[1], -1)
    total = counts.gather(1, place)[:, None] + more
    values = _penalized(given.gather(2, everywhere), total, prompts.gather(1, place)[:, None], strength)
    penalized.scatter_(2, everywhere, values)


def _add(logits: Tensor, requests: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values float32 [n, rows] to the logits of tokens int64 [n] in all rows of requests int64 [n]."""
    rows = torch.arange(logits.shape[1], device=logits.device)
    logits.index_put_((requests[:, None], rows, tokens[:, None]), values, accumulate=True)
