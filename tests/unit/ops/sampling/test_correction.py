"""Corrected guesses: torch twin and kernel against the definition."""

from __future__ import annotations

import bisect
import math

import pytest
import torch

from eagle_server.ops.sampling.correction import Correction, correct_guesses
from tests.support.kernels import each_variant, generator, on_device

EDGES = [math.log(chance) for chance in (0.02, 0.1, 0.5, 0.9)]
MOST = math.log(0.995)


@each_variant(correct_guesses)
@pytest.mark.parametrize(("bs", "nodes", "topk"), [(1, 1, 1), (3, 2, 4), (2, 64, 1), (5, 100, 3)])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_guess_is_corrected_by_the_ratio_of_its_bin(variant: str, bs: int, nodes: int, topk: int, depth: int) -> None:
    """As a view of a wider tensor, with guesses that are an edge, -inf or NaN."""
    source = generator(bs, nodes)
    wide = torch.rand(bs, nodes + 3, topk, generator=source).log()
    wide[:, ::5], wide[:, 3::11], wide[:, 4::13] = EDGES[1], -math.inf, math.nan
    ratios = torch.randn(2, 3, 2, len(EDGES) + 1, generator=source)
    temperature_bin = torch.randint(2, (bs,), generator=source)
    given = on_device(wide, ratios, torch.tensor(EDGES), temperature_bin)
    found = correct_guesses(given[0][:, 3:], Correction(*given[1:], depth, MOST)).cpu()
    edges = torch.tensor(EDGES).tolist()
    for b in range(bs):
        pairs = zip(wide[b, 3:].flatten().tolist(), found[b].flatten().tolist(), strict=True)
        for place, (guess, corrected) in enumerate(pairs):
            if math.isfinite(guess):
                later = int(place % topk > 0)
                ratio = float(ratios[temperature_bin[b], depth, later, bisect.bisect_left(edges, guess)])
                assert corrected == pytest.approx(min(guess + ratio, MOST), rel=1e-5, abs=1e-6)
            else:
                assert corrected == guess or (math.isnan(corrected) and math.isnan(guess))
