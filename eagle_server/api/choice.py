"""One choice while it is generated: token deltas in, pieces of text and scored tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from eagle_server.api.errors import ApiError, bad_request, unavailable
from eagle_server.engine.detokenizer import IncrementalDetokenizer, StopStrings, TokenSpelling
from eagle_server.request import DraftTree, FinishReason, Request, SpecStats, TokenDelta, TokenLogprob


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens, and as the text that `echo` gives back."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, None for the prompt's first. `offset` counts characters of the choice's text.

    `top` has the most likely alternatives, best first.
    """

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int


@dataclass
class Piece:
    """What one delta added to a choice. `trees` are there only if they were asked for."""

    index: int
    text: str = ""
    tokens: list[Scored] = field(default_factory=list)
    trees: list[DraftTree] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.tokens or self.trees or self.finish_reason)

    def extend(self, other: Piece) -> None:
        """Join the piece that follows."""
        self.text += other.text
        self.tokens += other.tokens
        self.trees += other.trees
        self.finish_reason = other.finish_reason


class Choice:
    """Follows one engine request. Offsets and stop strings are exact whatever number of tokens a delta brings.

    A token counts in `completion_tokens` up to and including the one that completes a stop string, as if tokens had
    come one by one; what else its cycle brought is dropped.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        prompt: Prompt,
        spelling: TokenSpelling,
        stops: Sequence[str],
        end_token_ids: frozenset[int],
        *,
        echo: bool,
    ) -> None:
        self.index = index
        self.request = request
        self.prompt = prompt
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.spec: SpecStats | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self._spelling = spelling
        self._detokenizer = IncrementalDetokenizer(spelling.tokenizer, prompt.token_ids)
        self._stops = StopStrings(stops)
        self._end_token_ids = end_token_ids
        self._echo_due = echo
        self._characters = 0

    @property
    def is_stopped(self) -> bool:
        """A stop string was found: the engine need not go on."""
        return self._stops.found

    def advance(self, delta: TokenDelta) -> Piece:
        """Take a delta in.

        Raises:
            ApiError: the engine refused the request or failed.
        """
        self._check(delta)
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        self.spec = delta.spec or self.spec
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        piece = Piece(self.index, trees=[] if delta.tree is None or self.is_stopped else [delta.tree])
        if self._echo_due:
            self._echo_due = False
            self._add_prompt(piece)
        if not self.is_stopped:
            self._add_tokens(piece, delta)
        if delta.finish_reason is not None:
            if not self.is_stopped:
                piece.text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
            piece.finish_reason = "stop" if self.is_stopped else delta.finish_reason.value
        return piece

    def _check(self, delta: TokenDelta) -> None:
        if self.is_stopped:
            return
        message = delta.error or "the engine gave no reason"
        if delta.finish_reason is FinishReason.REFUSED:
            raise bad_request(f"the request cannot be served: {message}")
        if delta.finish_reason is FinishReason.ERROR:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"generation failed: {message}")
        if delta.finish_reason is FinishReason.ABORT:
            raise unavailable("the engine aborted the request")

    def _add_tokens(self, piece: Piece, delta: TokenDelta) -> None:
        last = len(delta.token_ids) - 1
        for position, token_id in enumerate(delta.token_ids):
            ends = position == last and delta.finish_reason is FinishReason.STOP and token_id in self._end_token_ids
            fresh = "" if ends else self._detokenizer.push(token_id)
            if delta.logprobs is not None:
                entry = delta.logprobs[position]
                piece.tokens.append(Scored(token_id, entry.logprob, entry.top, self._characters))
            self.completion_tokens += 1
            self._characters += len(fresh)
            if self.completion_tokens < self.request.sampling.min_tokens:
                piece.text += fresh
                continue
            piece.text += self._stops.push(fresh)
            if self.is_stopped:
                return

    def _add_prompt(self, piece: Piece) -> None:
        piece.text = self.prompt.text
        self._characters = len(self.prompt.text)
        if not self.request.prompt_logprobs:
            return
        detokenizer, offset = IncrementalDetokenizer(self._spelling.tokenizer), 0
        for token_id, entry in zip(self.prompt.token_ids, [None, *self.prompt_logprobs], strict=True):
            logprob, top = (None, []) if entry is None else (entry.logprob, entry.top)
            piece.tokens.append(Scored(token_id, logprob, top, offset))
            offset += len(detokenizer.push(token_id))
