"""Check a request's token ids against the vocabulary, and its sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eagle_server.request import Request


def refusal(request: Request, vocab_size: int) -> str | None:
    """The first reason why a request can never be served; None if there is none."""
    params = request.sampling
    named: dict[str, Sequence[int]] = {
        "token": request.prompt_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [token for word in params.bad_words for token in word],
    }
    outside = (_outside(name, tokens, vocab_size) for name, tokens in named.items())
    return next((reason for reason in (*outside, *params.problems()) if reason is not None), None)


def _outside(name: str, tokens: Iterable[int], vocab_size: int) -> str | None:
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    where = "token id" if name == "token" else f"{name}: token id"
    return None if wrong is None else f"{where} {wrong} is outside the vocabulary of {vocab_size}"
