"""From checked bodies to calls: parameters made concrete, prompts in tokens, one engine request per choice."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from eagle_server.api.call import Call, Delivery
from eagle_server.api.chat_shape import ChatShape
from eagle_server.api.choice import Calls, Choice, Prompt
from eagle_server.api.errors import bad_request
from eagle_server.api.prompts import chat_prompt, check_token_ids, completion_prompt, too_long
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.schemas.generation import GenerationBody, StreamOptions
from eagle_server.api.service import Service
from eagle_server.api.shape import Header, Shape, Shown
from eagle_server.api.text_shape import TextShape
from eagle_server.api.tools import ToolUse, tool_use
from eagle_server.client.generation import EngineUnavailable
from eagle_server.request import Ready, Request, SamplingParams
from eagle_server.text.chat_template import Ending
from eagle_server.text.tokenizer import Tokenizer

MAX_SEQUENCES = 1024
SHORT = 4096  # bytes of a body whose prompts take less time to tokenize than a thread takes to start on them
GREEDY_BELOW = 1e-5  # a temperature this low only divides by nearly zero

_serial = count()  # a client may send the same x-request-id twice; the engine's ids differ all the same


@dataclass(frozen=True)
class Wanted:
    """What the endpoints differ in. `logprobs` is how many alternatives to show, `max_tokens` None for all that fit."""

    prompts: Callable[[int], Sequence[Prompt]]  # given the most tokens that a request may have
    max_tokens: int | None
    logprobs: int | None
    shape: Shape
    param: str  # what holds the prompt
    echo: bool = False
    ending: Ending = Ending()
    tools: ToolUse | None = None

    @property
    def calls(self) -> Calls | None:
        """For one choice."""
        return None if self.tools is None else Calls(self.tools.parser(), self.tools.syntax.markers)


async def completion_call(body: CompletionRequest, service: Service, request_id: str) -> Call:
    """
    Raises:
        ApiError: the request cannot be served.
        EngineUnavailable: there is no engine.
    """
    ready = check_service(body.model, service)
    wanted = Wanted(
        prompts=lambda limit: [
            completion_prompt(source, service.spelling.tokenizer, ready.vocab_size, limit, echo=body.echo)
            for source in body.prompts
        ],
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        shape=TextShape(Shown(service.spelling, body.logprobs, body.prompt_logprobs, body.return_trees)),
        param="prompt",
        echo=body.echo,
    )
    return await _call(body, wanted, service, ready, f"cmpl-{request_id}")


async def chat_call(body: ChatRequest, service: Service, request_id: str) -> Call:
    """
    Raises:
        ApiError: the request cannot be served.
        EngineUnavailable: there is no engine.
    """
    ready = check_service(body.model, service)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wanted = Wanted(
        prompts=lambda limit: [
            chat_prompt(body.messages, body, service.chat_template, service.spelling.tokenizer, limit)
        ],
        max_tokens=body.most_tokens,
        logprobs=logprobs,
        shape=ChatShape(Shown(service.spelling, logprobs, body.prompt_logprobs, body.return_trees)),
        param="messages",
        ending=service.chat_template.ending,
        tools=tool_use(body, service.call_syntax),
    )
    return await _call(body, wanted, service, ready, f"chatcmpl-{request_id}")


def check_service(model: str | None, service: Service) -> Ready:
    """What is served.

    Raises:
        ApiError: not this model.
        EngineUnavailable: nothing, there is no engine.
    """
    service.check_model(model)
    ready = service.client.ready
    if ready is None or not service.client.is_available:
        raise EngineUnavailable("the engine is not running")
    return ready


async def _call(body: GenerationBody, wanted: Wanted, service: Service, ready: Ready, name: str) -> Call:
    most = min(MAX_SEQUENCES, service.client.max_waiting or MAX_SEQUENCES)
    if not 1 <= body.sequences <= most:
        param = "n" if body.n > most else "prompt"
        raise bad_request(f"{param}: from 1 to {most} sequences in one request, prompts times n", param)
    for field in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(field, getattr(body, field) or [], ready.vocab_size)
    if body.size <= SHORT:
        prompts = wanted.prompts(ready.max_request_tokens)
    else:  # long prompts take long, and the tokenizer releases the interpreter lock
        prompts = await asyncio.to_thread(wanted.prompts, ready.max_request_tokens)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    room = ready.max_request_tokens - longest
    max_tokens = room if wanted.max_tokens is None else wanted.max_tokens
    if max_tokens > room or (wanted.max_tokens is None and room < 1):
        raise too_long(longest, max(max_tokens, 1), ready.max_request_tokens, wanted.param)
    if body.min_tokens > max_tokens:
        raise bad_request(f"min_tokens exceeds the {max_tokens} tokens that fit", "min_tokens", "invalid_value")
    sampling = _sampling(body, wanted, max_tokens, service.spelling.tokenizer, ready)
    ends = () if body.ignore_eos else ready.eos_token_ids
    serial = next(_serial)
    choices = [
        Choice(
            index,
            Request(
                request_id=f"{name}-{serial}-{index}",
                prompt_token_ids=prompts[index // body.n].token_ids,
                sampling=sampling,
                # Without a seed nothing is to be repeated: equal prompts of one call get their own noise too.
                choice=index if body.seed is None else index % body.n,
                prompt_logprobs=body.prompt_logprobs is not None or (wanted.echo and wanted.logprobs is not None),
                speculative=body.speculative,
                trees=body.return_trees,
            ),
            prompts[index // body.n],
            service.spelling,
            [*body.stops, *wanted.ending.stops],
            frozenset((*sampling.stop_token_ids, *ends)),
            echo=wanted.echo,
            calls=wanted.calls,
        )
        for index in range(body.sequences)
    ]
    header = Header(name, int(time.time()), service.model_name)
    delivery = Delivery(body.stream_options or StreamOptions(), body.stream_pacing, service.timeout_of(body.timeout))
    return Call(service.client, header, wanted.shape, choices, body.n, delivery)


def _sampling(
    body: GenerationBody, wanted: Wanted, max_tokens: int, tokenizer: Tokenizer, ready: Ready
) -> SamplingParams:
    asked = [number for number in (wanted.logprobs, body.prompt_logprobs) if number is not None]
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_tokens=body.min_tokens,
        temperature=0.0 if body.temperature < GREEDY_BELOW else body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_biases(body, ready.vocab_size),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids))),
        bad_words=_bad_words(body.bad_words, tokenizer),
        grammar=body.grammar if wanted.tools is None or wanted.tools.grammar is None else wanted.tools.grammar,
        ignore_eos=body.ignore_eos,
        stop_token_ids=(*body.stop_token_ids, *wanted.ending.token_ids),
        logprobs=max(asked, default=None),  # each shape shows as many as it was asked for
    )


def _biases(body: GenerationBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = {int(token): float(bias) for token, bias in body.logit_bias.items()}
    check_token_ids("logit_bias", list(biases), vocab_size)
    return tuple(sorted(biases.items()))


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words, as vLLM has them: each word as it is and, where that is one token pattern more, after a
    space. The spelling with a space counts only if it has as many tokens and begins with another one: else the space is
    a token of its own, and the plain spelling covers it."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tuple(tokenizer.encode(space + word.lstrip(), special=False)) for space in ("", " "))
        if not plain:
            raise bad_request(f"bad_words: {word!r} has no tokens", "bad_words", "invalid_value")
        sequences[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    return tuple(sequences)
