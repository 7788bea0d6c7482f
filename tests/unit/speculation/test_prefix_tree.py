"""Beams packed into prefix trees: unpacking restores the beam, and the tree has exactly the beam's prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_server.speculation.prefix_tree import PADDING, PackedBeam, pack, pack_like, tree_nodes, unpack
from eagle_server.speculation.tree import build_tree

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


def text(packed: PackedBeam, request: int, place: int) -> tuple[int, ...]:
    """The tokens that a place attends to, in ascending order of places."""
    seen = packed.attention_mask[request, place].nonzero().flatten()
    return tuple(packed.packed_beam[request, seen].tolist())


def test_the_published_example() -> None:
    packed = pack(torch.tensor(EXAMPLE), 9)
    assert packed.packed_beam.tolist() == [
        [91, 92, 93, 95, 94, 96, 97, PADDING, PADDING],
        [93, 94, 95, 92, 95, 96, 93, 97, 96],
    ]
    assert packed.unpack_map.tolist() == [
        [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 6]],
        [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 7, 8]],
    ]
    assert packed.position_offsets.tolist() == [[0, 1, 2, 3, 2, 3, 3, 0, 0], [0, 1, 2, 3, 1, 2, 3, 2, 3]]
    assert text(packed, 0, 6) == (91, 92, 93, 97)
    assert text(packed, 1, 8) == (93, 94, 97, 96)


def test_the_sentences_of_the_prefix_tree_document() -> None:
    """Mars is a red / Mars is reddish when / Mars is dark red: the nodes and mask of the document."""
    packed = pack(torch.tensor([[[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 3]]]))
    assert packed.packed_beam[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 3] + [PADDING] * 4
    assert [mask.nonzero().flatten().tolist() for mask in packed.attention_mask[0, :8]] == [
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
    packed = pack(beam)
    batch, count, width = beam.shape
    assert packed.packed_beam.shape == (batch, count * width)
    assert unpack(packed.packed_beam, packed.unpack_map).equal(beam)
    row = torch.arange(batch)[:, None, None]
    assert packed.packed_beam[row, packed.unpack_map].equal(beam)
    depths = torch.arange(width).expand_as(beam)
    assert unpack(packed.position_offsets, packed.unpack_map).equal(depths)
    for request in range(batch):
        expected = prefixes(beam[request])
        real = [p for p in range(count * width) if packed.packed_beam[request, p] != PADDING]
        assert real == list(range(len(expected)))  # padding comes last
        assert [text(packed, request, place) for place in real] == expected
        for i in range(count):
            for j in range(width):
                place = int(packed.unpack_map[request, i, j])
                assert expected[place] == tuple(beam[request, i, : j + 1].tolist())


@settings(deadline=None)
@given(beam=beams())
def test_ancestors_come_first_and_padding_is_alone(beam: Tensor) -> None:
    packed = pack(beam, beam.shape[1] * beam.shape[2] + 2)
    mask = packed.attention_mask
    assert mask.diagonal(dim1=1, dim2=2).all()
    assert not mask.triu(1).any()
    padding = packed.packed_beam == PADDING
    assert padding[:, -2:].all()
    others = mask & ~torch.eye(mask.shape[1], dtype=torch.bool)
    assert not others[padding].any()
    assert not others.transpose(1, 2)[padding].any()
    assert (mask.sum(-1) - 1).equal(packed.position_offsets)


@settings(deadline=None)
@given(beam=beams())
def test_values_are_packed_and_unpacked_like_tokens(beam: Tensor) -> None:
    packed = pack(beam)
    total = beam.cumsum(-1).float()  # equal where prefixes are
    values = pack_like(total, packed.unpack_map, packed.packed_beam.shape[1], padding=-1.0)
    assert unpack(values, packed.unpack_map).equal(total)
    assert ((values == -1) == (packed.packed_beam == PADDING)).all()
    vectors = torch.stack([values, 2 * values], dim=-1)
    assert unpack(vectors, packed.unpack_map).equal(torch.stack([total, 2 * total], dim=-1))


@settings(deadline=None)
@given(beam=beams(rooted=True), spare=st.integers(0, 2))
def test_a_packed_beam_becomes_the_same_tree(beam: Tensor, spare: int) -> None:
    batch, count, width = beam.shape
    size = count * (width - 1) + 1
    packed = pack(beam, size)
    nodes = tree_nodes(packed, size + spare)
    tree = build_tree(nodes, beam[:, 0, 0], torch.full((batch,), 4))
    assert nodes.spec_steps == width - 1
    assert tree.draft_token_num == size + spare
    tokens = tree.draft_token.view(batch, -1)
    assert tokens[:, :size].equal(packed.packed_beam)
    assert (tokens[:, size:] == PADDING).all()
    real = packed.packed_beam != PADDING
    assert tree.custom_mask[:, :size, :size][real].equal(packed.attention_mask[real])
    assert tree.depths[:, :size][real].equal(packed.position_offsets[real])
    assert (tree.parents[tokens == PADDING] == 0).all()


@settings(deadline=None)
@given(beam=beams(rooted=True), data=st.data())
def test_the_best_nodes_are_kept_with_their_ancestors(beam: Tensor, data: Any) -> None:
    batch, count, width = beam.shape
    size = count * (width - 1) + 1
    packed = pack(beam, size)
    kept = data.draw(st.integers(1, size))
    # A score that follows from the prefix alone, falls with every token and has ties.
    place = torch.arange(1, width + 1)
    scores = -((beam * place) % 3).cumsum(-1).float()
    worth = pack_like(scores - scores[:, :, :1], packed.unpack_map, size, padding=float("-inf"))
    tree = build_tree(tree_nodes(packed, kept, worth), beam[:, 0, 0], torch.zeros(batch, dtype=torch.int64))
    for request in range(batch):
        known = prefixes(beam[request])
        order = sorted(range(len(known)), key=lambda p: (-float(worth[request, p]), p))
        expected = [known[p] for p in sorted(order[:kept])]
        tokens = tree.draft_token.view(batch, -1)[request]
        real = [i for i in range(kept) if i == 0 or int(tokens[i]) != PADDING]
        found = [tuple(tokens[tree.custom_mask[request, i]].tolist()) for i in real]
        assert found == expected


def test_without_scores_the_first_nodes_are_kept() -> None:
    nodes = tree_nodes(pack(torch.tensor(EXAMPLE), 9), 4)
    assert nodes.tokens.tolist() == [[92, 93, 95], [94, 95, 92]]
    assert nodes.parents.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_nan_scores_keep_the_tree_whole() -> None:
    packed = pack(torch.tensor(EXAMPLE), 9)
    nodes = tree_nodes(packed, 5, torch.full((2, 9), torch.nan))
    assert nodes.tokens.tolist() == [[92, 93, 95, 94], [94, 95, 92, 95]]
    assert nodes.parents.tolist() == [[0, 1, 2, 1], [0, 1, 2, 0]]


@pytest.mark.parametrize("length", [3, 7])
def test_nodes_beyond_the_length_are_dropped(length: int) -> None:
    whole, short = pack(torch.tensor(EXAMPLE)), pack(torch.tensor(EXAMPLE), length)
    assert short.packed_beam.equal(whole.packed_beam[:, :length])
    assert short.attention_mask.equal(whole.attention_mask[:, :length, :length])
    assert short.unpack_map.equal(whole.unpack_map)


def test_scores_go_with_their_nodes() -> None:
    beam = torch.tensor([[[7, 1, 2], [7, 1, 3], [7, 4, 5]]])
    scores = torch.tensor([[[0.0, -0.5, -2.0], [0.0, -0.5, -1.0], [0.0, -1.5, -3.0]]])
    packed = pack(beam, 7)
    worth = pack_like(scores, packed.unpack_map, 7, padding=float("-inf"))
    few, all_of_them = tree_nodes(packed, 4, worth), tree_nodes(packed, 8, worth)
    assert few.tokens.tolist() == [[1, 3, 4]]
    assert few.scores is not None
    assert few.scores.tolist() == [[-0.5, -1.0, -1.5]]
    assert all_of_them.scores is not None
    assert all_of_them.tokens.tolist() == [[1, 2, 3, 4, 5, -1, -1]]
    assert all_of_them.scores.tolist() == [[-0.5, -2.0, -1.0, -1.5, -3.0, float("-inf"), float("-inf")]]
