"""From a checked body to the engine's requests, one for each choice. Nothing is submitted yet.

A field that has the same name and meaning in the body and in `SamplingParams` is copied by name. So a new sampling
parameter needs no edit here, unless its value must be converted: then its name goes into CONVERTED.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec

from eagle_server.api.errors import bad_request
from eagle_server.api.generation.answer_format import PLAIN, AnswerFormat, answer_format, tool_use
from eagle_server.api.generation.prompts import check_token_ids, encode, refuse_media, render, too_long
from eagle_server.api.generation.request_state import OutputDelta, Prompt, RequestState, TextOptions
from eagle_server.api.generation.response_parts import check_scores, possible_scores
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.api.schemas.generation import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS_TOKENS, GenerationBody
from eagle_server.api.schemas.translated import TranslatedBody
from eagle_server.api.service import Service
from eagle_server.request import Grammar, Ready, Request, SamplingParams
from eagle_server.text.chat_template import NO_STOPS, TemplateStops
from eagle_server.text.tokenizer import Tokenizer

CONVERTED = frozenset(
    {
        "max_tokens",
        "seed",
        "temperature",
        "top_k",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "grammar",
        "stop_token_ids",
        "logprobs",
    }
)
COPIED = tuple(name for name in SamplingParams.__struct_fields__ if name not in CONVERTED)
GREEDY_BELOW = 1e-5  # a lower temperature divides by nearly zero
MAX_SEQUENCES = 1024

_serial = count()  # makes engine ids unique: a client may send the same x-request-id twice


@dataclass(frozen=True)
class Prepared:
    """A request whose prompts are tokens and whose limits are checked.

    `body` is the client's completion or chat, or the chat that its body was translated to. `states` has one entry per
    sequence, with its engine request: `body.candidates` for each prompt in turn.
    """

    response_id: str
    body: GenerationBody
    states: list[RequestState]

    @property
    def first_states(self) -> list[RequestState]:
        """One per prompt."""
        return self.states[:: self.body.candidates]

    def best(self, outputs: list[OutputDelta]) -> list[OutputDelta]:
        """The `body.n` most likely outputs of each prompt, by their tokens' mean log-probability, the best first.

        `outputs` has one whole output per state, in order.
        """
        n, candidates = self.body.n, self.body.candidates
        if candidates == n:
            return outputs
        groups = (outputs[first : first + candidates] for first in range(0, len(outputs), candidates))
        rank = partial(sorted, key=lambda output: -self.states[output.index].mean_logprob)
        return [output for group in groups for output in rank(group)[:n]]


def prepare(
    body: GenerationBody,
    service: Service,
    ready: Ready,
    response_id: str,
    prompts: Iterable[Prompt],
    stops: TemplateStops = NO_STOPS,
    answer: AnswerFormat = PLAIN,
    *,
    strict: bool,
) -> Prepared:
    """Check a body, tokenize its prompts and make its engine requests.

    Long prompts take seconds, so routes call it through `body.process`. `prompts` is read after the checks that need no
    tokens. `stops` end the answer in addition to the body's own. `answer`: how thinking and tool calls are parsed.
    `strict`: a max_tokens that does not fit is an error; otherwise it is lowered.

    Raises:
        ApiError: the request cannot be served.
    """
    body = with_defaults(body, service.sampling_defaults)
    _check_count(body, service)
    for field in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(field, getattr(body, field) or [], ready.vocab_size)
    truncated = [prompt.truncated(body.truncate_prompt_tokens) for prompt in prompts]
    tokenizer = service.spelling.tokenizer
    if ready.media_token_ids is not None:
        refuse_media(
            truncated, {*ready.media_token_ids, *service.media_tokens}, tokenizer, body.name(body.prompt_param)
        )
    max_tokens = _max_tokens(body, truncated, ready, strict=strict)
    sampling = sampling_params(
        body,
        tokenizer,
        ready.vocab_size,
        max_tokens=max(max_tokens),
        stop_token_ids=stops.token_ids,
        grammar=answer.grammar(body.grammar),
    )
    check_scores(body, possible_scores(body, sum(len(prompt.token_ids) for prompt in truncated), sum(max_tokens)))
    eos_token_ids = frozenset(() if body.ignore_eos else ready.eos_token_ids)
    special = {} if body.skip_special_tokens else tokenizer.special
    options = TextOptions(
        [*body.stops, *stops.strings],
        # As in vLLM, an end-of-sequence token gives no stop_reason, also if the body names it.
        {*body.stops, *(set(body.stop_token_ids) - eos_token_ids)},
        body.include_stop_str_in_output,
        special,
        body.return_token_ids,
    )
    end_token_ids = eos_token_ids.union(sampling.stop_token_ids)
    states = [
        RequestState(index, request, truncated[index // body.candidates], tokenizer, options, end_token_ids, answer)
        for index, request in enumerate(_requests(body, response_id, truncated, sampling, max_tokens))
    ]
    return Prepared(response_id, body, states)


def prepare_chat(body: ChatRequest | TranslatedBody, service: Service, ready: Ready, response_id: str) -> Prepared:
    """Render a conversation, and `prepare` it.

    Raises:
        ApiError: the request cannot be served.
    """
    chat = body.chat if isinstance(body, TranslatedBody) else body
    template = service.chat_template
    tokenizer = service.spelling.tokenizer
    tools, text = tool_use(chat, service.call_syntax), render(chat.messages, chat, template)
    answer = answer_format(chat, text, service.reasoning_syntax, tools)
    prompt = _conversation(text, chat, service, ready)
    stops = answer.stops(template.stops, tokenizer)
    strict = service.strict_max_tokens and not (isinstance(body, TranslatedBody) and body.requires_max_tokens)
    return prepare(chat, service, ready, response_id, prompt, stops, answer, strict=strict)


def _conversation(text: str, body: ChatRequest, service: Service, ready: Ready) -> Iterator[Prompt]:
    """The conversation's text in tokens, as the only prompt.

    Raises:
        ApiError: it is too long.
    """
    param, special, last = body.name("messages"), service.chat_template.adds_special, body.truncate_prompt_tokens
    token_ids = encode(text, service.spelling.tokenizer, ready.max_request_tokens, param, special=special, last=last)
    if not token_ids:
        raise bad_request("the prompt is empty: it has no tokens", param, "invalid_value")
    yield Prompt(token_ids)


def _requests(
    body: GenerationBody,
    response_id: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    max_tokens: Sequence[int],
) -> Iterator[Request]:
    """The candidates of the first prompt, then of the second, ... `max_tokens` has one number per prompt."""
    serial = next(_serial)
    for index in range(body.sequences):
        prompt = index // body.candidates
        most = max_tokens[prompt]
        yield Request(
            request_id=f"{response_id}-{serial}-{index}",
            prompt_token_ids=prompts[prompt].token_ids,
            sampling=sampling if most == sampling.max_tokens else msgspec.structs.replace(sampling, max_tokens=most),
            # `choice` keys the random numbers. Without a seed nothing is repeated: equal prompts get different numbers.
            choice=index if body.seed is None else index % body.candidates,
            prompt_logprobs=body.needs_prompt_logprobs,
            speculative=body.speculative,
            trees=body.return_trees,
            cache_salt=body.cache_salt,
        )


def _check_count(body: GenerationBody, service: Service) -> None:
    most = min(MAX_SEQUENCES, service.client.most_at_once or MAX_SEQUENCES)
    if not 1 <= body.sequences <= most:
        param = "n" if body.n > most else "best_of" if body.candidates > most else "prompt"
        raise bad_request(f"{param}: from 1 to {most} sequences in one request, prompts times n or best_of", param)


def with_defaults(body: GenerationBody, defaults: Mapping[str, float]) -> GenerationBody:
    """The body with these parameters where it is silent about them."""
    missing = {name: value for name, value in defaults.items() if name not in body.model_fields_set}
    return body.model_copy(update=missing) if missing else body


def _max_tokens(body: GenerationBody, prompts: Sequence[Prompt], ready: Ready, *, strict: bool) -> list[int]:
    """Most tokens of each prompt's sequences: the body's number, but no more than the room after the prompt.

    Raises:
        ApiError: a prompt leaves no room, min_tokens does not fit, or the body's number does not and `strict` is set.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    room, wanted = ready.max_request_tokens - longest, body.max_output_tokens
    least = 0 if wanted == 0 else 1
    if room < least or (strict and wanted is not None and wanted > room):
        raise too_long(longest, max(wanted or 0, 1), ready.max_request_tokens, body)
    rooms = [ready.max_request_tokens - len(prompt.token_ids) for prompt in prompts]
    max_tokens = [room if wanted is None else min(wanted, room) for room in rooms]
    if body.min_tokens > min(max_tokens):
        raise bad_request(f"min_tokens exceeds the {min(max_tokens)} tokens that fit", "min_tokens", "invalid_value")
    return max_tokens


def sampling_params(
    body: GenerationBody,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    grammar: Grammar | None,
) -> SamplingParams:
    """`stop_token_ids` are added to the body's. `grammar` replaces the body's.

    Raises:
        ApiError: a token of logit_bias is outside the vocabulary, or a bad word has no tokens or too many.
    """
    ranking = 0 if body.candidates > body.n else None
    num_logprobs = [count for count in (body.num_logprobs, body.prompt_logprobs, ranking) if count is not None]
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        temperature=0.0 if body.temperature < GREEDY_BELOW else body.temperature,
        top_k=max(body.top_k, 0),  # -1 is vLLM's "all tokens"
        logit_bias=_logit_bias(body, vocab_size),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids))),
        bad_words=_bad_words(body.bad_words, tokenizer),
        grammar=grammar,
        stop_token_ids=(*body.stop_token_ids, *stop_token_ids),
        logprobs=max(num_logprobs, default=None),  # the response shows no more than each parameter asked for
        **{name: getattr(body, name) for name in COPIED},
    )


def _logit_bias(body: GenerationBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = {int(token): float(bias) for token, bias in body.logit_bias.items()}
    check_token_ids("logit_bias", list(biases), vocab_size)
    return tuple(sorted(biases.items()))


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words, by vLLM's rule.

    Each word counts as it is. It also counts with a space before it, if this sequence is as long and has another first
    token. Otherwise the space is a token of its own, and the plain sequence covers this spelling too.

    Raises:
        ApiError: a word has no tokens or too many, or all words together have too many.
    """
    sequences: dict[tuple[int, ...], None] = {}
    total = 0
    for word in dict.fromkeys(words):
        plain, spaced = (tuple(tokenizer.encode(space + word.lstrip(), special=False)) for space in ("", " "))
        if not plain:
            raise bad_request(f"bad_words: {word!r} has no tokens", "bad_words", "invalid_value")
        total += len(plain)
        if len(plain) > MAX_BAD_WORD_TOKENS or total > MAX_BAD_WORDS_TOKENS:
            limits = f"{MAX_BAD_WORD_TOKENS} tokens of a word and {MAX_BAD_WORDS_TOKENS} of all words"
            raise bad_request(f"bad_words: at most {limits} are possible", "bad_words", "invalid_value")
        sequences[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    return tuple(sequences)
