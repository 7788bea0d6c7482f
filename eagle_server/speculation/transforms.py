"""What a request's parameters do to its logits before temperature and truncation, in the order of `SamplingParams`.

A transform holds the settings of those requests of a batch that ask for it, and edits rows of logits in place. Row j of
a request is drawn given the text that is committed and, in a tree, the tokens on the path from the root to node j: with
every edit depending on that alone, a draw is the same wherever the row stands, in a tree or by itself.
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
BEGINNING = -2  # in a tail, what stands before the text
_ANY = -1  # in a bad word, what need not match
_PENALIZED_ROWS = 256  # of logits at a time, with some 20 bytes for each of their tokens


@dataclass(frozen=True)
class Paths:
    """How rows' texts go on from the committed one: row j has the tokens of its ancestors and its own.

    Row 0 is the root, whose token is committed itself.
    """

    tokens: Tensor  # int64 [bs, rows], -1: padding, which no other row has among its ancestors
    parents: Tensor  # int64 [bs, rows], -1 at row 0
    ancestors: Tensor  # bool [bs, rows, rows], ancestors and self

    def of(self, requests: Tensor) -> Paths:
        """Those of some requests, int64 [n]."""
        return Paths(*(part.index_select(0, requests) for part in (self.tokens, self.parents, self.ancestors)))


@dataclass(frozen=True)
class PenalizerState:
    """What transforms read of the committed texts, in the order of the batch: counts for requests that are `penalized`,
    tails for those with a `lookback`."""

    counts: Tensor | None = None  # float32 [h, vocab], how often each token occurs in the output
    prompts: Tensor | None = None  # bool [h, vocab], whether it occurs in the prompt
    tails: Tensor | None = None  # int64 [w, longest lookback], the last tokens, newest last, -2 before the first


@dataclass(frozen=True)
class Rows:
    """Where rows of logits [bs, rows, vocab] stand. Without `paths` each has the committed text before it."""

    positions: Tensor  # int64 [bs, rows], of the tokens to be drawn
    paths: Paths | None
    penalizer_state: PenalizerState


class Transform(Protocol):
    """One parameter's effect."""

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Edit logits float32 [bs, rows, vocab] in place."""
        ...


@dataclass(frozen=True)
class Masks:
    """-inf for the tokens that a grammar forbids: each row's bits, of the requests that have one."""

    requests: tuple[int, ...]
    bits: Tensor  # int32 [len(requests), rows, vocab / 32], the lowest first

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """One request at a time, for the memory of the bits spread out."""
        tokens = torch.arange(logits.shape[2], device=logits.device)
        for request, bits in zip(self.requests, self.bits, strict=True):
            logits[request].masked_fill_(~allowed_by(bits, tokens), _OFF)


def allowed_by(bits: Tensor, tokens: Tensor) -> Tensor:
    """Whether rows of a grammar's bits, int32 [rows, vocab / 32], have those of tokens int64 [n]: bool [rows, n]."""
    word, place = tokens // MASK_WORD, (tokens % MASK_WORD).to(torch.int32)
    return (bits.index_select(1, word) >> place & 1) != 0


@dataclass(frozen=True)
class LogitBias:
    """l + bias for each entry of logit_bias; l - inf for a bad word of one token."""

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
    """l - inf outside allowed_token_ids."""

    requests: Tensor  # int64 [a]
    entries: Tensor  # int64 [2, entries], numbers into `requests`, and tokens

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
    """l - inf for the last token of a word whose other tokens end the row's text, be they prompt, output or both."""

    requests: Tensor  # int64 [w], those with words of several tokens
    words: Tensor  # int64 [3, words], of each its number into `requests`, its request and its last token
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
    """l - inf for tokens that would end a text, at positions below the first where they may."""

    requests: Tensor  # int64 [entries]
    tokens: Tensor  # int64 [entries]
    allowed_from: Tensor  # int64 [entries]

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> MinTokens | None:
        entries = [(i, token, s.allowed_from) for i, s in enumerate(settings) for token in s.stop_ids]
        return cls(*upload(entries, device).T) if entries else None

    def apply(self, logits: Tensor, rows: Rows) -> None:
        early = rows.positions.index_select(0, self.requests) < self.allowed_from[:, None]
        _add(logits, self.requests, self.tokens, torch.where(early, _OFF, 0.0))


@dataclass(frozen=True)
class Penalties:
    """With n the token's count in the output, for tokens of prompt or output l' = l / r where l > 0, else l * r;
    then l' - f * n - p * [n > 0]."""

    requests: Tensor  # int64 [h]
    strength: Tensor  # float32 [3, h], r, f and p of each

    @classmethod
    def of(cls, settings: Sequence[RequestSampling], device: torch.device) -> Penalties | None:
        chosen = [(i, setting) for i, setting in enumerate(settings) if setting.penalized]
        if not chosen:
            return None
        params = [setting.params for _, setting in chosen]
        strength = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        return cls(upload([i for i, _ in chosen], device), upload(strength, device, torch.float32).T)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """A few requests at a time, for the memory of the intermediate results."""
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
    """What a batch of these settings needs, in order. Grammars' Masks, new in every cycle, come before."""
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

    tails int64 [bs, width], the committed texts' last tokens, newest last.
    """
    bs, width = tails.shape
    chain = torch.arange(width, device=tails.device)
    if paths is None:
        return tails.flip(1)[:, None]
    # The tails stand before the tree as a chain that ends in its root, so the way back is one walk to the parents.
    tokens = torch.cat([tails, paths.tokens[:, 1:]], dim=1)
    parents = torch.cat([(chain - 1).clamp(min=0).expand(bs, -1), paths.parents[:, 1:] + (width - 1)], dim=1)
    place = torch.arange(width - 1, tokens.shape[1], device=tails.device).expand(bs, -1)  # [bs, rows]
    found = []
    for _ in range(width):
        found.append(tokens.gather(1, place))
        place = parents.gather(1, place)
    return torch.stack(found, dim=2)


def _penalized(logits: Tensor, counts: Tensor, prompts: Tensor, strength: Tensor) -> Tensor:
    """`Penalties`' formula on logits [n, rows, m], with counts and prompts of their shape, strength [n, 3]."""
    repetition, frequency, presence = strength.T[:, :, None, None]
    occurs = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    subtracted: Tensor = frequency * counts + presence * occurs
    return torch.where(prompts | occurs, scaled, logits) - subtracted


def _count_paths(
    penalized: Tensor, given: Tensor, paths: Paths, counts: Tensor, prompts: Tensor, strength: Tensor
) -> None:
    """Penalize the trees' tokens anew, [n, rows, vocab] in place, with their counts on each row's path added.

    Only a tree's own rows - 1 tokens may count more than in the committed output; one that is not on a row's path is
    given the value it had.
    """
    tokens = paths.tokens[:, 1:]  # [n, rows - 1]
    place = tokens.clamp(min=0)
    same = tokens[:, :, None] == place[:, None]  # padding is the same as none
    more = paths.ancestors[:, :, 1:].float() @ same.float()  # [n, rows, rows - 1]
    everywhere = place[:, None].expand(-1, given.shape[1], -1)
    total = counts.gather(1, place)[:, None] + more
    values = _penalized(given.gather(2, everywhere), total, prompts.gather(1, place)[:, None], strength)
    penalized.scatter_(2, everywhere, values)


def _add(logits: Tensor, requests: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values float32 [n, rows] to the logits of tokens int64 [n] in all rows of requests int64 [n]."""
    rows = torch.arange(logits.shape[1], device=logits.device)
    logits.index_put_((requests[:, None], rows, tokens[:, None]), values, accumulate=True)
