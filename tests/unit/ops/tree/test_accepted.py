"""Storing, counting and reading what was accepted: torch twins and kernels against plain Python."""

from __future__ import annotations

import pytest
import torch

from eagle_server.ops.tree.accepted import extend_rows, newest_rows, next_lengths, store_accepted
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


@each_variant(next_lengths)
@pytest.mark.parametrize(("bs", "width"), [(1, 1), (5, 7), (130, 3)])
def test_a_request_grows_by_what_it_accepted_and_the_bonus(variant: str, bs: int, width: int) -> None:
    source = generator(bs, width)
    lens, accepted = torch.randint(99, (bs,), generator=source), torch.randint(width, (bs,), generator=source)
    tokens = torch.randint(-1, 50, (bs, width), generator=source)
    found = next_lengths(*on_device(lens, accepted, tokens))
    assert found.extend_lens.tolist() == [count + 1 for count in accepted.tolist()]
    assert found.seq_lens.tolist() == [n + count + 1 for n, count in zip(lens.tolist(), accepted.tolist(), strict=True)]
    assert found.following.tolist() == [n + 1 for n in found.seq_lens.tolist()]
    assert found.verified_id.tolist() == [max(0, int(tokens[b, accepted[b]])) for b in range(bs)]


@each_variant(extend_rows)
@pytest.mark.parametrize(("bs", "width", "size"), [(1, 1, 3), (4, 5, 1100), (3, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_draft_extend_are_the_stored_ones(
    variant: str, bs: int, width: int, size: int, dtype: torch.dtype
) -> None:
    source = generator(bs, size)
    stored_tokens = torch.randint(1000, (REQUESTS, width + 1), generator=source)
    stored_features = torch.randn(REQUESTS, width + 1, size, generator=source).to(dtype)
    rows = torch.randperm(REQUESTS, generator=source)[:bs]
    lens, counts = torch.randint(9, 99, (bs,), generator=source), torch.randint(1, width + 1, (bs,), generator=source)
    found = extend_rows(*on_device(stored_tokens, stored_features, rows, lens, counts), width)
    assert torch.equal(found.tokens.cpu(), stored_tokens[rows, :width].flatten())
    assert torch.equal(found.features.cpu(), stored_features[rows, :width].flatten(0, 1))
    starts = [length - count for length, count in zip(lens.tolist(), counts.tolist(), strict=True)]
    assert found.first.tolist() == starts
    assert found.positions.tolist() == [start + step for start in starts for step in range(width)]


@each_variant(newest_rows)
@pytest.mark.parametrize(("bs", "width", "copies", "size"), [(1, 1, 1, 3), (3, 4, 8, 1100), (2, 7, 2, 64)])
def test_the_newest_row_of_each_request_is_copied_for_its_nodes(
    variant: str, bs: int, width: int, copies: int, size: int
) -> None:
    """Both results may have dtypes of their own."""
    source = generator(bs, size)
    normed = torch.randn(bs * width, size, generator=source)
    feedback = torch.randn(bs * width, size, generator=source).bfloat16()
    counts = torch.randint(1, width + 1, (bs,), generator=source)
    newest, hidden = (part.cpu() for part in newest_rows(*on_device(normed, feedback, counts), copies))
    for b in range(bs):
        row = b * width + int(counts[b]) - 1
        assert torch.equal(newest[b], normed[row])
        assert all(torch.equal(hidden[b * copies + copy], feedback[row]) for copy in range(copies))
