"""Beams packed into prefix trees: unpacking restores the beam, and the tree has exactly the beam's prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_server.speculation.prefix_tree import PADDING, beam_tree, pack, pack_like
from tests.support.trees import path_to

# The published example of the beam-to-prefix-tree conversion, two requests.
EXAMPLE = [
    [[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]],
    [[93, 94, 95, 92], [93, 95, 96, 93], [93, 94, 97, 96]],
]


@st.composite
def beams(draw: Any, *, rooted: bool = False) -> Tensor:
    """Up to 3 requests of 5 sequences of 5 tokens. The vocabulary is small, so that prefixes are shared."""
    batch, count, width = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    size = batch * count * width
    values = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    beam = torch.tensor(values).view(batch, count, width)
    if rooted:
        beam[:, :, 0] = torch.arange(batch)[:, None] + 7
    return beam


def prefixes(beam: Tensor) -> list[tuple[int, ...]]:
    """The distinct prefixes of one request's sequences, in order of first occurrence."""
    return list(dict.fromkeys(tuple(row[: j + 1]) for row in beam.tolist() for j in range(len(row))))


def unpack(x: Tensor, unpack_map: Tensor) -> Tensor:
    """Values per packed token, [B, L], as values per token of the beam, [B, M, C]."""
    return x[torch.arange(len(x))[:, None, None], unpack_map]


def text(packed: Tensor, parents: Tensor, place: int) -> tuple[int, ...]:
    """The tokens on the path to a place of one request's tree."""
    return tuple(packed[path_to(parents.tolist(), place)].tolist())


def test_the_published_example() -> None:
    packed, parents, unpack_map = pack(torch.tensor(EXAMPLE), 9)
    assert packed.tolist() == [
        [91, 92, 93, 95, 94, 96, 97, PADDING, PADDING],
        [93, 94, 95, 92, 95, 96, 93, 97, 96],
    ]
    assert unpack_map.tolist() == [
        [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 6]],
        [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 7, 8]],
    ]
    assert parents.tolist() == [[-1, 0, 1, 2, 1, 4, 2, -1, -1], [-1, 0, 1, 2, 0, 4, 5, 1, 7]]
    assert text(packed[0], parents[0], 6) == (91, 92, 93, 97)
    assert text(packed[1], parents[1], 8) == (93, 94, 97, 96)


def test_the_sentences_of_the_prefix_tree_document() -> None:
    """Mars is a red / Mars is reddish when / Mars is dark red: the nodes and mask of the document."""
    beam = torch.tensor([[[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 3]]])
    tree = beam_tree(beam, torch.zeros(beam.shape), torch.tensor([5]), 12)
    assert tree.tokens[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 3] + [PADDING] * 4
    assert tree.positions[0, :8].tolist() == [5, 6, 7, 8, 7, 8, 7, 8]
    assert [mask.nonzero().flatten().tolist() for mask in tree.mask[0, :8]] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 4],
        [0, 1, 4, 5],
        [0, 1, 6],
        [0, 1, 6, 7],
    ]


@settings(deadline=None)
@given(beam=beams())
def test_packing_keeps_every_prefix_once_and_unpacking_restores_the_beam(beam: Tensor) -> None:
    packed, parents, unpack_map = pack(beam)
    batch, count, width = beam.shape
    assert packed.shape == parents.shape == (batch, count * width)
    assert unpack(packed, unpack_map).equal(beam)
    for request in range(batch):
        expected = prefixes(beam[request])
        real = [p for p in range(count * width) if packed[request, p] != PADDING]
        assert real == list(range(len(expected)))  # padding comes last
        assert [text(packed[request], parents[request], place) for place in real] == expected
        for i in range(count):
            for j in range(width):
                assert expected[int(unpack_map[request, i, j])] == tuple(beam[request, i, : j + 1].tolist())


@settings(deadline=None)
@given(beam=beams())
def test_parents_come_first_and_padding_has_none(beam: Tensor) -> None:
    packed, parents, _ = pack(beam, beam.shape[1] * beam.shape[2] + 2)
    padding = packed == PADDING
    assert padding[:, -2:].all()
    assert (parents < torch.arange(parents.shape[1])).all()
    assert (parents[padding] == -1).all()


@settings(deadline=None)
@given(beam=beams())
def test_values_are_packed_and_unpacked_like_tokens(beam: Tensor) -> None:
    packed, _, unpack_map = pack(beam)
    total = beam.cumsum(-1).float()  # equal where prefixes are
    values = pack_like(total, unpack_map, packed.shape[1], padding=-1.0)
    assert unpack(values, unpack_map).equal(total)
    assert ((values == -1) == (packed == PADDING)).all()
    vectors = torch.stack([values, 2 * values], dim=-1)
    assert unpack(vectors, unpack_map).equal(torch.stack([total, 2 * total], dim=-1))


@settings(deadline=None)
@given(beam=beams(rooted=True), spare=st.integers(0, 2))
def test_a_packed_beam_becomes_the_same_tree(beam: Tensor, spare: int) -> None:
    batch, count, width = beam.shape
    size = count * (width - 1) + 1
    packed, parents, _ = pack(beam, size)
    tree = beam_tree(beam, torch.zeros(beam.shape), torch.full((batch,), 4), size + spare)
    assert (tree.steps, tree.size) == (width - 1, size + spare)
    assert tree.tokens[:, :size].equal(packed)
    assert (tree.tokens[:, size:] == PADDING).all()
    real = packed != PADDING
    assert tree.parents[:, :size][real].equal(parents[real])
    assert (tree.parents[tree.tokens == PADDING] == 0).all()


@settings(deadline=None)
@given(beam=beams(rooted=True), data=st.data())
def test_the_best_nodes_are_kept_with_their_ancestors(beam: Tensor, data: Any) -> None:
    batch, count, width = beam.shape
    size = count * (width - 1) + 1
    kept = data.draw(st.integers(1, size))
    # A score that follows from the prefix alone, falls with every token and has ties.
    place = torch.arange(1, width + 1)
    scores = -((beam * place) % 3).cumsum(-1).float()
    scores = scores - scores[:, :, :1]
    worth = pack_like(scores, pack(beam, size)[2], size, padding=float("-inf"))
    tree = beam_tree(beam, scores, torch.zeros(batch, dtype=torch.int64), kept)
    for request in range(batch):
        known = prefixes(beam[request])
        order = sorted(range(len(known)), key=lambda p: (-float(worth[request, p]), p))
        expected = [known[p] for p in sorted(order[:kept])]
        tokens = tree.tokens[request]
        real = [i for i in range(kept) if i == 0 or int(tokens[i]) != PADDING]
        found = [tuple(tokens[tree.mask[request, i]].tolist()) for i in real]
        assert found == expected


def test_nan_scores_keep_the_tree_whole() -> None:
    beam = torch.tensor(EXAMPLE)
    tree = beam_tree(beam, torch.full(beam.shape, torch.nan), torch.tensor([3, 4]), 5)
    assert tree.tokens.tolist() == [[91, 92, 93, 95, 94], [93, 94, 95, 92, 95]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 1], [-1, 0, 1, 2, 0]]


@pytest.mark.parametrize("length", [3, 7])
def test_nodes_beyond_the_length_are_dropped(length: int) -> None:
    whole, short = pack(torch.tensor(EXAMPLE)), pack(torch.tensor(EXAMPLE), length)
    assert [part.tolist() for part in short[:2]] == [part[:, :length].tolist() for part in whole[:2]]
    assert short[2].equal(whole[2])


def test_scores_go_with_their_nodes() -> None:
    beam = torch.tensor([[[7, 1, 2], [7, 1, 3], [7, 4, 5]]])
    scores = torch.tensor([[[0.0, -0.5, -2.0], [0.0, -0.5, -1.0], [0.0, -1.5, -3.0]]])
    few, all_of_them = (beam_tree(beam, scores, torch.tensor([4]), count) for count in (4, 8))
    assert few.tokens.tolist() == [[7, 1, 3, 4]]
    assert few.scores is not None
    assert few.scores.tolist() == [[-0.5, -1.0, -1.5]]
    assert all_of_them.scores is not None
    assert all_of_them.tokens.tolist() == [[7, 1, 2, 3, 4, 5, -1, -1]]
    assert all_of_them.scores.tolist() == [[-0.5, -2.0, -1.0, -1.5, -3.0, float("-inf"), float("-inf")]]
