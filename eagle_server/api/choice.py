"""One choice while it is generated: token deltas in, pieces of text and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from eagle_server.api.errors import ApiError, bad_request, unavailable
from eagle_server.api.responses import Logprobs
from eagle_server.engine.detokenizer import IncrementalDetokenizer, StopStrings, TokenSpelling
from eagle_server.request import FinishReason, Request, SpecStats, TokenDelta, TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens, and as the text that `echo` gives back."""

    token_ids: list[int]
    text: str


@dataclass
class Piece:
    """What one delta added to a choice."""

    index: int
    text: str = ""
    logprobs: Logprobs = field(default_factory=Logprobs)
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.logprobs.tokens or self.finish_reason)


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
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.spec: SpecStats | None = None
        self._prompt = prompt
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
        piece = Piece(self.index)
        if self._echo_due:
            self._echo_due = False
            self._add_prompt(piece, delta.prompt_logprobs)
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
                self._add_logprob(piece.logprobs, delta.logprobs[position], self._characters)
            self.completion_tokens += 1
            self._characters += len(fresh)
            if self.completion_tokens < self.request.sampling.min_tokens:
                piece.text += fresh
                continue
            piece.text += self._stops.push(fresh)
            if self.is_stopped:
                return

    def _add_prompt(self, piece: Piece, logprobs: list[TokenLogprob] | None) -> None:
        piece.text = self._prompt.text
        self._characters = len(self._prompt.text)
        if not self.request.prompt_logprobs:
            return
        detokenizer, offset = IncrementalDetokenizer(self._spelling.tokenizer), 0
        entries = [None, *(logprobs or [])]
        for token_id, entry in zip(self._prompt.token_ids, entries, strict=True):
            if entry is None:
                piece.logprobs.tokens.append(self._spelling(token_id))
                piece.logprobs.token_logprobs.append(None)
                piece.logprobs.top_logprobs.append(None)
                piece.logprobs.text_offset.append(0)
            else:
                self._add_logprob(piece.logprobs, entry, offset)
            offset += len(detokenizer.push(token_id))

    def _add_logprob(self, logprobs: Logprobs, entry: TokenLogprob, offset: int) -> None:
        """`top_logprobs` holds the alternatives and the token itself, so up to one more than were asked for."""
        top: dict[str, float] = {}
        for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._spelling(token_id), max(value, LOWEST_LOGPROB))
        logprobs.tokens.append(self._spelling(entry.token_id))
        logprobs.token_logprobs.append(max(entry.logprob, LOWEST_LOGPROB))
        logprobs.top_logprobs.append(top)
        logprobs.text_offset.append(offset)
