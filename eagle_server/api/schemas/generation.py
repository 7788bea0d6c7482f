"""Parameters that all generating endpoints share: sampling, stopping and streaming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import Field

from eagle_server.api.schemas.base import Body, Part
from eagle_server.api.schemas.grammar import ResponseFormat, StructuredOutputs
from eagle_server.request import REPETITION_PENALTIES, Grammar

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024
# Every cycle compares the end of the text with all words, so their tokens are memory and time of every cycle.
MAX_BAD_WORD_TOKENS = 128  # of a word
MAX_BAD_WORDS_TOKENS = 8192  # of all words together, each counted once
MAX_TEXT = 1024  # characters of a stop text or a bad word
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 2**19  # more than any vocabulary
MAX_TEMPERATURE = 100.0  # the distribution is flat long before
MAX_TIMEOUT = 24 * 3600.0
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

NonEmpty = Annotated[str, Field(min_length=1)]
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
# A list of a million token ids is not a list of strings: one error says so.
FAIL_FAST = Field(fail_fast=True)
TokenIds = Annotated[list[int], FAIL_FAST]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopTexts = Annotated[list[ShortText], Field(max_length=MAX_STOPS)]
Stops = ShortText | StopTexts
EXPECTED_STOPS = f"should be a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_TEXT} characters"


class StreamOptions(Part):
    """`continuous_usage_stats` puts the usage so far on every event. One event may carry several tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(Body):
    """Parameters of all generating endpoints, those of other APIs included; docs/api.md explains each.

    Texts and lists are bounded, because each is processed for every request or in every cycle.

    A parameter with the name of a field of `request.SamplingParams` is copied into it, see `api/generation/prepare.py`.
    """

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "length_penalty": (1,),
        "use_beam_search": (False,),
        "early_stopping": (False,),
        "spaces_between_special_tokens": (True,),
        "no_stop_trim": (False,),
        "return_hidden_states": (False,),
    }
    aliases: ClassVar[dict[str, tuple[str, str]]] = {
        **{f"guided_{field}": ("structured_outputs", field) for field in ("json", "regex", "choice", "grammar")},
        # SGLang's
        "json_schema": ("structured_outputs", "json"),
        "regex": ("structured_outputs", "regex"),
        "ebnf": ("structured_outputs", "grammar"),
    }
    expected: ClassVar[dict[str, str]] = {
        "store": "is not supported: no client can read an answer again; set it to false, or leave it out",
        "logit_bias": f"should map at most {MAX_BIASES} token ids, as strings, to numbers from -100 to 100",
    }

    model: str | None = None
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT32_MAX)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict, max_length=MAX_BIASES)
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[ShortText], FAIL_FAST] = Field(
        default_factory=list,
        max_length=MAX_BAD_WORDS,
        description=f"At most {MAX_BAD_WORD_TOKENS} tokens of a word, and {MAX_BAD_WORDS_TOKENS} of all words.",
    )
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    speculative: bool = True
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    cache_salt: ShortText | None = None
    store: Literal[False] | None = None  # False: --record-rows-dir leaves the answer out

    @property
    def sequences(self) -> int:
        """Number of sequences to generate."""
        return 1


class GenerationBody(SamplingBody):
    """Parameters of completions and chats."""

    prompt_param: ClassVar[str]  # the parameter that errors about the prompt name
    logprobs_param: ClassVar[str]  # the parameter with the number of alternatives per output token

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingBody.neutral,
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
    }
    expected: ClassVar[dict[str, str]] = {**SamplingBody.expected, "stop": EXPECTED_STOPS}

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Stops = Field(default_factory=list)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_trees: bool = False
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    # What clients say about a request for their provider's bookkeeping: without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def grammar(self) -> Grammar | None:
        if self.structured_outputs is not None:
            return replace(self.structured_outputs.grammar, param=f"structured_outputs.{self.structured_outputs.field}")
        grammar = None if self.response_format is None else self.response_format.grammar
        if grammar is None:
            return None
        param = self.name("response_format")
        if grammar.kind == "json_schema":
            param += ".json_schema.schema" if param == "response_format" else ".schema"
        return replace(grammar, param=param)

    @property
    def candidates(self) -> int:
        """Number of sequences to generate for each prompt. The answer has the best `n` of them."""
        return self.n

    @property
    def sequences(self) -> int:
        return self.candidates

    @property
    def max_output_tokens(self) -> int | None:
        """Most tokens of each sequence. None: as many as fit."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to show per output token. None: no log-probabilities."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the answer repeats the prompt, with its log-probabilities if it has any."""
        return False

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the engine must score the prompt's tokens."""
        return self.prompt_logprobs is not None or (self.echoes and self.num_logprobs is not None)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.stream_options is not None and not self.stream:
            yield "stream_options", "needs stream: true"
        if self.prompt_logprobs is not None and self.stream:
            yield "prompt_logprobs", "is not supported with stream: true"
        asks_for_format = self.response_format is not None and self.response_format.type != "text"
        if asks_for_format and self.structured_outputs is not None:
            yield "structured_outputs", f"and {self.name('response_format')} ask for two things; drop one of them"
