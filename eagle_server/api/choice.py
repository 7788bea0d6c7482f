"""One choice while it is generated: token deltas in, pieces of text and scored tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from eagle_server.api.errors import ApiError, bad_request, unavailable
from eagle_server.request import DraftTree, FinishReason, Request, SpecStats, TokenDelta, TokenLogprob
from eagle_server.text.detokenizer import IncrementalDetokenizer, StopStrings, TokenSpelling
from eagle_server.text.tool_parser import CallDelta, Said, ToolCallParser, join


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
    """What one delta added to a choice, `text` without the `calls` in it. `trees` only if they were asked for."""

    index: int
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    tokens: list[Scored] = field(default_factory=list)
    trees: list[DraftTree] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.calls or self.tokens or self.trees or self.finish_reason)

    def extend(self, other: Piece) -> None:
        """Join the piece that follows."""
        self.text += other.text
        join(self.calls, other.calls)
        self.tokens += other.tokens
        self.trees += other.trees
        self.finish_reason = other.finish_reason


@dataclass(frozen=True)
class Calls:
    """How calls are found in a choice's text, and the special tokens that count as text for that."""

    parser: ToolCallParser
    markers: Mapping[int, str]


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
        calls: Calls | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.prompt = prompt
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.spec: SpecStats | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self._spelling = spelling
        self._calls = None if calls is None else calls.parser
        shown = None if calls is None else calls.markers
        self._detokenizer = IncrementalDetokenizer(spelling.tokenizer, prompt.token_ids, shown)
        self._stops = StopStrings(stops)
        self._end_token_ids = end_token_ids
        self._echo_due = echo
        self._characters = 0

    @property
    def is_stopped(self) -> bool:
        """A stop string was found, or the only call that was wanted is complete: the engine need not go on."""
        return self._stops.found or (self._calls is not None and self._calls.is_done)

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
                self._add_text(piece, self._stops.push(self._detokenizer.flush()) + self._stops.flush())
            if self._calls is not None:
                _add(piece, self._calls.flush())
            piece.finish_reason = self._reason(delta.finish_reason)
        return piece

    def _reason(self, reason: FinishReason) -> str:
        """OpenAI's word for why it ended."""
        if not (self.is_stopped or reason is FinishReason.STOP):
            return str(reason.value)
        return "tool_calls" if self._calls is not None and self._calls.complete else "stop"

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
            counts = self.completion_tokens >= self.request.sampling.min_tokens
            self._add_text(piece, self._stops.push(fresh) if counts else fresh)
            if self.is_stopped:
                return

    def _add_text(self, piece: Piece, text: str) -> None:
        if self._calls is None:
            piece.text += text
        elif text:
            _add(piece, self._calls.push(text))

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


def _add(piece: Piece, said: Said) -> None:
    piece.text += said.content
    join(piece.calls, said.calls)
