"""A reference for SamplingParams in plain Python, one text at a time, independent of the package's sampling code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.request import Request, SamplingParams
from eagle_server.speculation.random import request_key
from tests.support.scoring import logits_of

INF = math.inf


def transformed(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stops: Iterable[int],
) -> list[float]:
    """The transformed logits of the token after prompt and output, before temperature."""
    values = list(logits)
    for token, bias in params.logit_bias:
        values[token] += bias
    if params.allowed_token_ids is not None:
        values = [v if token in params.allowed_token_ids else -INF for token, v in enumerate(values)]
    text = [*prompt, *output]
    for word in params.bad_words:
        beginning = list(word[:-1])
        if text[len(text) - len(beginning) :] == beginning:
            values[word[-1]] = -INF
    if len(output) < params.min_tokens:
        for token in stops:
            values[token] = -INF
    for token, value in enumerate(values):
        count = list(output).count(token)
        if count or token in prompt:
            r = params.repetition_penalty
            values[token] = value / r if value > 0 else value * r
        values[token] -= params.frequency_penalty * count
        if count:
            values[token] -= params.presence_penalty
    return values


def token_probs(values: Sequence[float], params: SamplingParams) -> list[float]:
    """Probabilities of the next token: temperature, top_k, top_p, min_p, in this order. Ties go to the lower id."""
    scaled = [value / params.temperature for value in values]
    order = sorted((t for t in range(len(scaled)) if scaled[t] > -INF), key=lambda token: (-scaled[token], token))
    order = order[: params.top_k or len(order)]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    total, before, kept = math.fsum(weights.values()), 0.0, []
    for token in order:
        if before < params.top_p or not kept:
            kept.append(token)
        before += weights[token] / total
    kept = [token for token in kept if weights[token] >= params.min_p]  # the best token has weight 1
    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(scaled))]


def scores(values: Sequence[float], params: SamplingParams, key: int, position: int) -> list[float]:
    """The scores whose argmax is the drawn token: the values, or log-probabilities plus Gumbel noise."""
    if params.temperature == 0:
        return list(values)
    noise = gumbel(torch.tensor([key]), torch.tensor([position]), len(values))[0].tolist()
    probs = token_probs(values, params)
    return [math.log(p) + g if p else -INF for p, g in zip(probs, noise, strict=True)]


@dataclass(frozen=True)
class Text:
    """An output, and the smallest gap between the two best scores of its draws, also with nudged truncations."""

    tokens: list[int]
    slack: float


def text_of(target: TargetModel, request: Request) -> Text:
    """The expected output of a request, token by token. `target` is float64."""
    params, prompt = request.sampling, request.prompt_token_ids
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else target.config.eos_token_ids)}
    key = request_key(params.seed, request.choice)
    output: list[int] = []
    slack = INF
    while len(output) < params.max_tokens and not set(output[-1:]) & stops:
        row = logits_of(target, [*prompt, *output])[-1].tolist()
        values = transformed(row, params, prompt, output, stops)
        drawn = scores(values, params, key, len(prompt) + len(output))
        token = drawn.index(max(drawn))
        for nudge in (-1e-5, 1e-5):
            limits = SamplingParams(
                max_tokens=1,
                seed=0,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p + nudge if params.top_p < 1 else 1.0,
                min_p=params.min_p + nudge if params.min_p else 0.0,
            )
            nudged = scores(values, limits, key, len(prompt) + len(output))
            best, second = sorted(range(len(nudged)), key=nudged.__getitem__, reverse=True)[:2]
            slack = min(slack, nudged[best] - nudged[second] if best == token else 0.0)
        output.append(token)
    return Text(output, slack)
