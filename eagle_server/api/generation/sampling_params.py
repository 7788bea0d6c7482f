"""From a checked body to `SamplingParams`.

A field that has the same name and meaning in the body and in `SamplingParams` is copied by name. So a new sampling
parameter needs no edit here, unless its value must be converted: then its name goes into CONVERTED.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from eagle_server.api.errors import bad_request
from eagle_server.api.generation.prompts import check_token_ids
from eagle_server.api.schemas.generation import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS_TOKENS, GenerationBody
from eagle_server.request import Grammar, SamplingParams
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
