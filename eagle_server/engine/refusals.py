"""What a request may not ask for, because no draw could follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from eagle_server.request import Request, SamplingParams


def refusal(request: Request, vocab_size: int) -> str | None:
    """The first reason not to serve a request; None if there is none."""
    params = request.sampling
    named: dict[str, Sequence[int]] = {
        "token": request.prompt_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [token for word in params.bad_words for token in word],
    }
    outside = (_outside(name, tokens, vocab_size) for name, tokens in named.items())
    return next((reason for reason in (*outside, *_wrong(params)) if reason is not None), None)


def _outside(name: str, tokens: Iterable[int], vocab_size: int) -> str | None:
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    where = "token id" if name == "token" else f"{name}: token id"
    return None if wrong is None else f"{where} {wrong} is outside the vocabulary of {vocab_size}"


def _wrong(params: SamplingParams) -> Iterator[str]:
    """Reasons that do not depend on the model."""
    biases = {f"the logit_bias of token id {token}": bias for token, bias in params.logit_bias}
    penalties = {"presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty}
    factors = {"repetition_penalty": params.repetition_penalty, "temperature": params.temperature}
    for name, value in (biases | penalties | factors).items():
        if not math.isfinite(value):
            yield f"{name} is {value}; it must be finite"
    checks = (
        (
            params.grammar is None or not params.ignore_eos,
            "ignore_eos: with a grammar the text ends where the grammar does; drop one of the two",
        ),
        (params.allowed_token_ids != (), "allowed_token_ids is empty: no token could be drawn"),
        (() not in params.bad_words, "bad_words: a word has no tokens"),
        (params.repetition_penalty > 0, f"repetition_penalty is {params.repetition_penalty}; it must be above 0"),
        (params.temperature >= 0, f"temperature is {params.temperature}; it must not be negative"),
        (0 < params.top_p <= 1, f"top_p is {params.top_p}; it must be above 0 and at most 1"),
        (0 <= params.min_p <= 1, f"min_p is {params.min_p}; it must be from 0 to 1"),
        (params.top_k >= 0, f"top_k is {params.top_k}; it must not be negative"),
    )
    yield from (reason for right, reason in checks if not right)
