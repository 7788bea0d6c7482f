"""Coupled drafting on the host: estimates of continuations, given the noise of the target's draw.

`worker/batch/draft_ranking.py` does the same with logits on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from eagle_server.plan import Decode
from eagle_server.speculation.random import TokenNoise

_LEAST = 1e-3  # of the probability that estimates leave to tokens without a name


class CoupledEstimates:
    """The estimates at the nodes of one request's trie in one cycle, at temperature above 0.

    q are the estimates of the named tokens. If they were the target's probabilities, its draw would follow from
    s(x) = log q(x) + G(x). So x gets half of q(x), and half of the softmax of s among the named tokens and one score
    for all others, log(1 - sum of q), which has no noise. A text was sampled at its temperature, so its counts are not
    divided by it.
    """

    def __init__(self, decode: Decode) -> None:
        self._key, self._first = decode.sampling.key, decode.seq_len + 1  # position of the root's children
        self._noise: dict[int, TokenNoise] = {}  # by depth of the parent

    def given_noise(self, depth: int, estimates: Mapping[int, float]) -> dict[int, float]:
        """The estimates of the children of a node at `depth` (the root's is 0), by token. Their sum is at most 1."""
        noise = self._noise.get(depth)
        if noise is None:
            noise = self._noise[depth] = TokenNoise(self._key, self._first + depth)
        masses = {token: estimate * math.exp(noise(token)) for token, estimate in estimates.items()}
        total = sum(masses.values()) + max(1 - sum(estimates.values()), _LEAST)
        return {token: (estimates[token] + mass / total) / 2 for token, mass in masses.items()}


def coupled_estimates(decode: Decode) -> CoupledEstimates | None:
    """None for greedy requests: their estimates stay as they are."""
    return CoupledEstimates(decode) if decode.sampling.params.temperature > 0 else None
