"""One choice while it is generated: token deltas in; text, thinking, tool calls and scored tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from eagle_server.api.errors import ApiError, bad_request, unavailable
from eagle_server.api.generation.answer_format import PLAIN, AnswerFormat
from eagle_server.request import DraftTree, FinishReason, Request, SpecStats, TokenDelta, TokenLogprob
from eagle_server.text.detokenizer import IncrementalDetokenizer
from eagle_server.text.reasoning_parser import ReasoningParser
from eagle_server.text.stop_strings import StopStrings
from eagle_server.text.tokenizer import Tokenizer
from eagle_server.text.tools.parser import ParsedText, ToolCallDelta, join


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens. `echo` is its text if the answer repeats it, else None."""

    token_ids: list[int]
    echo: str | None = None

    def truncated(self, most: int | None) -> Prompt:
        """The last `most` tokens; None: all. The echo is still the whole text."""
        return self if most is None else replace(self, token_ids=self.token_ids[-most:])


@dataclass(frozen=True)
class ScoredToken:
    """A token and its log-probability, which is None for the first token of a prompt.

    `top` has the most likely alternatives, best first. `offset` counts characters of the choice's text.
    """

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int


@dataclass(frozen=True)
class TextOptions:
    """Stop strings of an output, and what it shows: the stop string, special tokens by their spelling, token ids.

    `own_stops`: the stop strings and stop tokens that the request's body names, for `stop_reason`.
    """

    stops: Sequence[str] = ()
    own_stops: Set[str | int] = frozenset()
    keep_stop: bool = False
    special: Mapping[int, str] = field(default_factory=dict)
    token_ids: bool = False


@dataclass
class OutputDelta:
    """The output that one token delta added to a choice. `text` has neither thinking nor tool calls.

    `is_first` marks the choice's first delta that is not empty. `tokens`, `token_ids` and `trees` are empty
    unless the request asked for them. `stop_reason` is the stop string or the stop token of the request that ended the
    text, None if something else did.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    trees: list[DraftTree] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_first: bool = False

    @property
    def is_empty(self) -> bool:
        texts = (self.text, self.reasoning, self.tool_calls)
        return not any((*texts, self.tokens, self.token_ids, self.trees, self.finish_reason))

    def extend(self, other: OutputDelta) -> None:
        """Append the next delta of the same choice."""
        self.text += other.text
        self.reasoning += other.reasoning
        join(self.tool_calls, other.tool_calls)
        self.tokens += other.tokens
        self.token_ids += other.token_ids
        self.trees += other.trees
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason

    def add_parsed(self, parsed: ParsedText) -> None:
        """Append what the parser returned."""
        self.text += parsed.content
        self.reasoning += parsed.reasoning
        join(self.tool_calls, parsed.tool_calls)


class RequestState:
    """Follows one engine request, which is one choice of an API request.

    Text offsets and stop strings do not depend on how many tokens a delta has. `completion_tokens` counts tokens up to
    and including the one that completes a stop string. Later tokens are dropped. `reasoning_tokens` counts
    tokens up to and including the one that ends the thinking.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        prompt: Prompt,
        tokenizer: Tokenizer,
        options: TextOptions,
        end_token_ids: frozenset[int],
        answer: AnswerFormat = PLAIN,
    ) -> None:
        """`end_token_ids`: the tokens that end generation, which have no text by default."""
        self.index = index
        self.request = request
        self.prompt = prompt
        self.completion_tokens = self.reasoning_tokens = 0
        self._logprobs = 0.0  # sum over the completion's tokens, if they have log-probabilities
        self.cached_tokens = 0
        self.spec: SpecStats | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self._tokenizer = tokenizer
        self._parser = answer.parser()
        self._reasoning = self._parser if isinstance(self._parser, ReasoningParser) else None
        visible = {**options.special, **answer.markers}
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt.token_ids, visible)
        self._stops = StopStrings(options.stops, keep=options.keep_stop)
        self._options = options
        self._end_token_ids = end_token_ids
        self._end_token: int | None = None  # the one that ended generation
        self._must_echo = prompt.echo is not None
        self._text_offset = 0
        self._has_output = False

    @property
    def is_stopped(self) -> bool:
        """Whether the answer is complete although the engine still generates.

        Either a stop string was found, or the only tool call that the request allows is complete.
        """
        return self._stops.found or (self._parser is not None and self._parser.is_done)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.match

    def process(self, delta: TokenDelta) -> OutputDelta:
        """Detokenize a delta, cut it at a stop string and parse it. Call `raise_if_failed` afterwards."""
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        self.spec = delta.spec or self.spec
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        output = OutputDelta(self.index, trees=[] if delta.tree is None or self.is_stopped else [delta.tree])
        if self._must_echo:
            self._must_echo = False
            self._add_prompt(output)
        if not self.is_stopped:
            self._add_tokens(output, delta)
        is_complete = self.is_stopped or delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if delta.finish_reason is not None and is_complete:
            if not self.is_stopped:
                self._add_text(output, self._stops.push(self._detokenizer.flush()) + self._stops.flush())
            if self._parser is not None:
                output.add_parsed(self._parser.flush())
            output.finish_reason = self._finish_reason(delta.finish_reason)
            output.stop_reason = self._stop_reason
        if not (self._has_output or output.is_empty):
            self._has_output = output.is_first = True
        return output

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the output's tokens, including the one that ended it."""
        return self._logprobs / max(self.completion_tokens, 1)

    def _finish_reason(self, reason: FinishReason) -> str:
        """OpenAI's `finish_reason`."""
        if not (self.is_stopped or reason is FinishReason.STOP):
            return str(reason.value)
        return "tool_calls" if self._parser is not None and self._parser.complete else "stop"

    @property
    def _stop_reason(self) -> str | int | None:
        """vLLM's `stop_reason`."""
        ended = self._end_token if self.stop_string is None else self.stop_string
        return ended if ended in self._options.own_stops else None

    def raise_if_failed(self, delta: TokenDelta) -> None:
        """
        Raises:
            ApiError: the engine refused the request, failed or aborted it, and the answer is not complete.
        """
        if self.is_stopped:
            return
        message = delta.error or "the engine gave no reason"
        if delta.finish_reason is FinishReason.REFUSED:
            if delta.param is not None:
                raise bad_request(message, delta.param, "invalid_value")
            raise bad_request(f"the request cannot be served: {message}")
        if delta.finish_reason is FinishReason.ERROR:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"generation failed: {message}")
        if delta.finish_reason is FinishReason.ABORT:
            raise unavailable("the engine aborted the request")

    def _add_tokens(self, output: OutputDelta, delta: TokenDelta) -> None:
        last = len(delta.token_ids) - 1
        for position, token_id in enumerate(delta.token_ids):
            ends = position == last and delta.finish_reason is FinishReason.STOP and token_id in self._end_token_ids
            if ends:
                self._end_token = token_id
            text = "" if ends and not self._options.keep_stop else self._detokenizer.push(token_id)
            if self._options.token_ids:
                output.token_ids.append(token_id)
            if delta.logprobs is not None:
                entry = delta.logprobs[position]
                output.tokens.append(ScoredToken(token_id, entry.logprob, entry.top, self._text_offset))
                self._logprobs += entry.logprob
            self.completion_tokens += 1
            self._text_offset += len(text)
            may_stop = self.completion_tokens >= self.request.sampling.min_tokens
            thinking = None if self._reasoning is None or self._reasoning.is_answering else self._reasoning
            self._add_text(output, self._stops.push(text) if may_stop else text)
            if thinking is not None and thinking.thinks:
                self.reasoning_tokens = self.completion_tokens
            if self.is_stopped:
                return

    def _add_text(self, output: OutputDelta, text: str) -> None:
        if self._parser is None:
            output.text += text
        elif text:
            output.add_parsed(self._parser.push(text))

    def _add_prompt(self, output: OutputDelta) -> None:
        """Echo the prompt's text, with its scores if they were asked for."""
        output.text = self.prompt.echo or ""
        self._text_offset = len(output.text)
        if not self.request.prompt_logprobs:
            return
        detokenizer, offset = IncrementalDetokenizer(self._tokenizer), 0
        for token_id, entry in zip(self.prompt.token_ids, [None, *self.prompt_logprobs], strict=True):
            logprob, top = (None, []) if entry is None else (entry.logprob, entry.top)
            output.tokens.append(ScoredToken(token_id, logprob, top, offset))
            offset += len(detokenizer.push(token_id))
