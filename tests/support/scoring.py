"""Dense float64 logits of a text, and how clear its draws are. Independent of the package's sampling code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.attention.recurrent import DenseRows
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.recurrent.nodes import RecurrentLayer
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.request import Request, SamplingParams
from eagle_server.speculation.random import request_key

NEAR_TIE = 1e-4  # two best scores closer than this may swap between kernels: the only reason for different texts


class Windowed(BoundAttention):
    """`BoundAttention`: dense causal attention over one sequence, with every layer's sliding window."""

    def __init__(self, length: int) -> None:
        self.distance = torch.arange(length)[:, None] - torch.arange(length)
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, q: Tensor, layer: LayerSpec) -> Tensor:
        return self.run(q, *self.kv[layer.index], layer)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        self.kv[layer.index] = k, v
        seen = (self.distance >= 0) & (self.distance < (layer.sliding_window or len(self.distance)))
        return DenseCausal(1, torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -math.inf)).run(q, k, v, layer)

    def recur(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        return DenseRows(1).run(x, gates, layer)


def in_float64(target: TargetModel) -> TargetModel:
    """A float64 copy of the target."""
    copy = TargetModel(replace(target.config, dtype=torch.float64), target.rope.cos.shape[0])
    with torch.no_grad():
        for (name, theirs), (_, mine) in zip(target.weight_views(), copy.weight_views(), strict=True):
            assert mine.shape == theirs.shape, name
            mine.copy_(theirs)
    return copy.double().requires_grad_(requires_grad=False).eval()


def logits_of(target: TargetModel, tokens: Sequence[int]) -> Tensor:
    """Logits [len(tokens), vocab]. Row i predicts token i + 1."""
    hidden = target(torch.tensor(tokens), torch.arange(len(tokens)), Windowed(len(tokens))).hidden
    return target.logits(hidden)


def token_probs(logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The distribution of a draw from `logits` [vocab]: temperature, top_k, then top_p. Ties go to the lower id."""
    scaled = [float(x) / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = order[: top_k or len(order)]
    weights = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
    total, before, kept = math.fsum(weights), 0.0, 0
    for weight in weights:
        if before >= top_p and kept:
            break
        before += weight / total
        kept += 1
    total = math.fsum(weights[:kept])
    result = [0.0] * len(scaled)
    for token, weight in zip(order[:kept], weights, strict=False):
        result[token] = weight / total
    return result


def slack(target: TargetModel, request: Request, output: Sequence[int]) -> float:
    """The smallest gap between the two best scores of any draw of a text. A small gap means that a draw may change.

    0 if the request does not draw this text, or if nudging a truncation by 1e-5 changes a draw. `target` is float64.
    """
    params, prompt = request.sampling, request.prompt_token_ids
    logits = logits_of(target, [*prompt, *output])[len(prompt) - 1 : -1]
    key = torch.tensor([request_key(params.seed, request.choice)])
    stops = [*params.stop_token_ids, *(() if params.ignore_eos else target.config.eos_token_ids)]
    gaps = []
    for index, token in enumerate(output):
        row = logits[index].clone()
        if index < params.min_tokens:
            row[stops] = -math.inf
        noise = gumbel(key, torch.tensor([len(prompt) + index]), len(row))[0].double()
        for nudge in (-1e-5, 0.0, 1e-5):
            scores = row if params.temperature == 0 else _log_probs(row, params, nudge) + noise
            best, tokens = scores.topk(2)
            gaps.append(float(best[0] - best[1]) if int(tokens[0]) == token else 0.0)
    return min(gaps)


def _log_probs(row: Tensor, params: SamplingParams, nudge: float) -> Tensor:
    top_p = params.top_p if params.top_p == 1 else params.top_p + nudge
    return (
        torch.tensor(token_probs(row, temperature=params.temperature, top_k=params.top_k, top_p=top_p)).double().log()
    )
