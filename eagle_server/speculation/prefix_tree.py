"""Beams packed to prefix trees: sequences that begin alike share what they have in common.

`pack` and `unpack` convert between a beam and its tree, `tree_nodes` makes a packed beam a proposal. All shapes follow
from the arguments' shapes, so nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.speculation.tree import TreeNodes

PADDING = -1


class PackedBeam(NamedTuple):
    """A prefix tree per request, L places each: its nodes, parents before children, then padding.

    Nodes stand in row-major order of the beam: sequence 0 comes first and whole, and of each later sequence what none
    before it has. Padding sees only itself and is seen by nobody.
    """

    packed_beam: Tensor  # [B, L], -1: padding
    attention_mask: Tensor  # bool [B, L, L], ancestors and self
    position_offsets: Tensor  # int64 [B, L], depth: 0 at the first tokens, and for padding
    unpack_map: Tensor  # int64 [B, M, C], places: packed_beam[unpack_map] == beam


def pack(beam: Tensor, length: int | None = None) -> PackedBeam:
    """The prefix trees of beams [B, M, C]: M sequences of C tokens each, none of them negative.

    `length`: how many places there are, M * C by default. Nodes beyond it are dropped, so it should be a bound that the
    caller knows, like M * (C - 1) + 1 where all sequences begin with one token.
    """
    batch, beams, width = beam.shape
    places = beams * width if length is None else length
    device = beam.device
    agree = (beam[:, :, None] == beam[:, None]).cumprod(-1)  # [B, M, M, C], prefixes of two sequences
    first = agree.argmax(2)  # [B, M, C], the first sequence with this prefix
    own = (first == torch.arange(beams, device=device)[:, None]).flatten(1)
    order = own.cumsum(1) - 1  # the place of each token that is its prefix's first
    column = torch.arange(width, device=device)
    unpack_map = order.gather(1, (first * width + column).flatten(1)).view_as(beam)
    # One place more takes what is a copy, and goes.
    goal = torch.where(own & (order < places), order, places)
    source = torch.full((batch, places + 1), PADDING, device=device)
    entries = torch.arange(beams * width, device=device).expand(batch, -1)
    source = source.scatter(1, goal, entries)[:, :places]
    real, entry = source >= 0, source.clamp(min=0)
    offsets = torch.where(real, entry % width, 0)
    packed = torch.where(real, beam.flatten(1).gather(1, entry), PADDING)
    sequence = torch.div(entry, width, rounding_mode="floor")
    path = unpack_map.gather(1, sequence[:, :, None].expand(-1, -1, width))  # [B, L, C]
    above = real[:, :, None] & (column <= offsets[:, :, None])
    mask = torch.zeros(batch, places, places + 1, dtype=torch.bool, device=device)
    mask = mask.scatter(2, torch.where(above, path, places), value=True)[:, :, :places]
    return PackedBeam(packed, mask | torch.eye(places, dtype=torch.bool, device=device), offsets, unpack_map)


def unpack(x: Tensor, unpack_map: Tensor) -> Tensor:
    """What a model made of the packed tokens, [B, L, ...], as the beam has them: [B, M, C, ...]."""
    batch = torch.arange(len(x), device=x.device)[:, None, None]
    return x[batch, unpack_map]


def pack_like(values: Tensor, unpack_map: Tensor, length: int, padding: float) -> Tensor:
    """Values of the beam's tokens [B, M, C], equal where prefixes are, in the places of the tree: [B, L]."""
    out = values.new_full((len(values), length), padding)
    return out.scatter(1, unpack_map.flatten(1), values.flatten(1))


def tree_nodes(packed: PackedBeam, draft_token_num: int, scores: Tensor | None = None) -> TreeNodes:
    """A proposal of `draft_token_num` nodes with the root, which is the token that all sequences begin with.

    Where a tree has more nodes, those with the best `scores` [B, L] are kept; a node must not outscore its parent, so
    the choice is closed under ancestors. Without scores the first ones are kept. Where it has fewer, padding is added,
    whose score is -inf.
    """
    device, places = packed.packed_beam.device, packed.packed_beam.shape[1]
    number = torch.arange(places, device=device)
    above = packed.attention_mask & (number != number[:, None])
    parents = torch.where(above, number, 0).amax(-1)  # the nearest ancestor has the highest number; padding: the root
    tokens, kept = packed.packed_beam, min(draft_token_num, places)
    if scores is not None:
        scores = torch.where(tokens == PADDING, float("-inf"), scores.nan_to_num(nan=float("-inf")))
    if kept < places and scores is not None:
        worth = torch.where(number == 0, float("inf"), scores)
        chosen = worth.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
        tokens, scores = tokens.gather(1, chosen), scores.gather(1, chosen)
        parents = torch.searchsorted(chosen, parents.gather(1, chosen))
    missing = (0, draft_token_num - kept)
    return TreeNodes(
        F.pad(tokens[:, 1:kept], missing, value=PADDING),
        F.pad(parents[:, 1:kept], missing),
        spec_steps=packed.unpack_map.shape[2] - 1,
        scores=None if scores is None else F.pad(scores[:, 1:kept], missing, value=float("-inf")),
    )
