"""The body of POST /v1/completions: what is understood, and how what is not is refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from eagle_server.api.errors import bad_request

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0  # the law is flat long before
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

# Parameters of OpenAI's and of other servers' API that are not supported. A neutral value asks for nothing; null does
# so for every parameter.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
}

# Where a value may have several types, one sentence says more than one error per type.
EXPECTED = {
    "prompt": "should be a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": f"should be a string or a list of at most {MAX_STOPS} strings, none of them empty",
}

StopString = Annotated[str, Field(min_length=1)]
# A list of a million token ids is not a list of strings: one error says so.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """`continuous_usage_stats` puts the usage so far on every event, since one event may carry several tokens."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionRequest(BaseModel):
    """A checked body; null parameters have been left out before."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    prompt: str | Texts | TokenIds | TokenIdLists
    model: str | None = None
    max_tokens: int = Field(16, ge=0)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT32_MAX)
    seed: int | None = Field(None, ge=-INT64_MAX, le=INT64_MAX)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt; token ids where they were given so."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


def parse_completion(body: bytes) -> CompletionRequest:
    """The checked request.

    Raises:
        ApiError: status 400, naming the parameter.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise bad_request("the body should be a JSON object")
    values = {name: value for name, value in values.items() if value is not None}
    for name in NEUTRAL.keys() & values.keys():
        if values.pop(name) not in NEUTRAL[name]:
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
    try:
        request = CompletionRequest.model_validate(values)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)[0]) from None
    _check_agreement(request)
    return request


def _refusal(error: ErrorDetails) -> Exception:
    name = ".".join(str(part) for part in error["loc"]) or None
    top = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "missing":
        return bad_request(f"{name} is required", name, "missing_parameter")
    if error["type"] == "extra_forbidden":
        return bad_request(f"unknown parameter {name}", name, "unknown_parameter")
    if top in EXPECTED:
        return bad_request(f"{top} {EXPECTED[top]}", top, "invalid_value")
    return bad_request(f"{name}: {error['msg']}", name, "invalid_value")


def _check_agreement(request: CompletionRequest) -> None:
    """Rules between parameters."""
    problems = {
        "stream_options": request.stream_options is not None and not request.stream and "needs stream: true",
        "best_of": request.best_of not in (None, request.n) and f"is not supported unless it equals n, {request.n}",
        "min_tokens": request.min_tokens > request.max_tokens and f"exceeds max_tokens, {request.max_tokens}",
        "max_tokens": request.max_tokens == 0 and not request.echo and "should be at least 1 without echo",
    }
    for name, problem in problems.items():
        if problem:
            raise bad_request(f"{name} {problem}", name, "invalid_value")
