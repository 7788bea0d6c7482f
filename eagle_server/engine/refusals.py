"""Check a request's token ids against the vocabulary, and its sampling parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from eagle_server.request import Request, SamplingParams


def refusal(request: Request, vocab_size: int, stop_ids: Collection[int]) -> str | None:
    """The first reason why a request can never be served; None if there is none. `stop_ids` are in the vocabulary."""
    params = request.sampling
    named: dict[str, Sequence[int]] = {
        "token": request.prompt_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [token for word in params.bad_words for token in word],
    }
    outside = (_outside(name, tokens, vocab_size) for name, tokens in named.items())
    found = next((reason for reason in (*outside, *params.problems()) if reason is not None), None)
    return found or _contradiction(params, vocab_size, stop_ids)


def _outside(name: str, tokens: Sequence[int], vocab_size: int) -> str | None:
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return None
    wrong = next(token for token in tokens if not 0 <= token < vocab_size)
    where = "token id" if name == "token" else f"{name}: token id"
    return f"{where} {wrong} is outside the vocabulary of {vocab_size}"


def _contradiction(params: SamplingParams, vocab_size: int, stop_ids: Collection[int]) -> str | None:
    """Why no token may be the first, whatever the prompt. Bad words of several tokens depend on the text."""
    forbidden = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        forbidden.update(stop_ids)
    if params.allowed_token_ids is None:
        return "bad_words and min_tokens together forbid every token" if len(forbidden) >= vocab_size else None
    if forbidden.issuperset(params.allowed_token_ids):
        return "allowed_token_ids: bad_words and min_tokens forbid every one of them"
    return None
