"""Storing what was accepted: torch twin and kernel against plain Python."""

from __future__ import annotations

import pytest
import torch

from eagle_server.ops.tree.accepted import store_accepted
from tests.support.covering import covering
from tests.support.kernels import each_variant, generator, on_device

REQUESTS = 9


@each_variant(store_accepted)
@pytest.mark.parametrize(
    ("bs", "nodes", "width", "size", "dtype"),
    covering(
        [(1, 1, 1, 3), (3, 64, 7, 40), (2, 5, 3, 1), (4, 13, 4, 1100)], [torch.float32, torch.bfloat16], together=1
    ),
)
def test_features_and_tokens_of_the_path_are_stored_in_the_requests_row(
    variant: str, bs: int, nodes: int, width: int, size: int, dtype: torch.dtype
) -> None:
    """From a view of wider features. Other rows, and later columns, keep their content."""
    source = generator(bs, size)
    features = torch.randn(bs * nodes, size + 2, generator=source).to(dtype)[:, 1:-1]
    path = torch.randint(-1, nodes, (bs, width), generator=source)
    tokens = torch.where(path < 0, -1, torch.randint(1000, (bs, width), generator=source))
    rows = torch.randperm(REQUESTS, generator=source)[:bs]
    stored_tokens, stored_features = (
        torch.full((REQUESTS, width + 1), 77),
        torch.full((REQUESTS, width + 1, size), 7.0, dtype=dtype),
    )
    given = on_device(features, path, tokens, rows, stored_tokens.clone(), stored_features.clone())
    chosen = store_accepted(*given).cpu()
    for b in range(bs):
        for j in range(width):
            node, token = max(int(path[b, j]), 0), max(int(tokens[b, j]), 0)
            assert torch.equal(chosen[b, j], features[b * nodes + node])
            stored_features[rows[b], j] = features[b * nodes + node]
            stored_tokens[rows[b], j] = token
    assert torch.equal(given[4].cpu(), stored_tokens)
    assert torch.equal(given[5].cpu(), stored_features)
