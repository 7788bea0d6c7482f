"""The tie rule: when two texts of one model may differ.

Kernels round differently for one row and for many rows. So if the best two tokens of a position have nearly the same
score, either may win. Two texts may differ at such a position and nowhere else. Both tokens must score within
`margin * |best score|` of the best token. The scores come from a dense forward over the text up to that position. The
tokens after the first difference are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.request import Request
from eagle_server.speculation.random import request_key

MARGIN = {torch.bfloat16: 2.0**-6, torch.float32: 1e-5}


@dataclass
class Verdict:
    """Counts of compared positions and of near-ties in the plain text. Differences at near-ties are `excused`; others
    are `wrong`."""

    compared: int = 0
    near_ties: int = 0
    excused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.compared} positions, {self.near_ties} near-ties, {len(self.excused)} departures there, "
            f"{len(self.wrong)} elsewhere: {self.wrong}"
        )


@torch.inference_mode()
def judge(
    target: TargetModel,
    requests: Sequence[Request],
    plain: Mapping[str, Sequence[int]],
    fast: Mapping[str, Sequence[int]],
    margin: float,
) -> Verdict:
    """Compare the texts of `requests` token by token, up to the first difference in each."""
    verdict = Verdict()
    for each in requests:
        ours, theirs = fast[each.request_id], plain[each.request_id]
        scores = _scores(target, each, theirs)
        best = scores.topk(2, dim=1).values
        room = margin * best[:, 0].abs()
        same = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
        end = len(theirs) if same is None else same + 1
        verdict.compared += end
        verdict.near_ties += int((best[:end, 0] - best[:end, 1] <= room[:end]).sum())
        if same is None:
            if len(ours) != len(theirs):
                verdict.wrong.append(f"request {each.request_id}: {len(ours)} tokens instead of {len(theirs)}")
            continue
        lost = float(best[same, 0] - scores[same, [theirs[same], ours[same]]].min())
        text = f"request {each.request_id}, token {same}: {ours[same]} for {theirs[same]}, {lost:.4f} below the best"
        (verdict.excused if lost <= float(room[same]) else verdict.wrong).append(text)
    return verdict


def _scores(target: TargetModel, request: Request, text: Sequence[int]) -> Tensor:
    """The scores from which every token of `text` was drawn, noise included: float32 [len(text), vocab] on the CPU."""
    prompt, params, device = request.prompt_token_ids, request.sampling, target.embed.device
    tokens = torch.tensor([*prompt, *text], device=device)
    hidden = target(tokens, torch.arange(len(tokens), device=device), DenseCausal(1)).hidden
    logits = target.logits(hidden[len(prompt) - 1 : -1]).float().cpu()
    if params.temperature == 0:
        return logits
    positions = torch.arange(len(prompt), len(prompt) + len(text))
    keys = torch.full_like(positions, request_key(params.seed, request.choice))
    return logits / params.temperature + gumbel(keys, positions, logits.shape[1])
