"""Beams packed into prefix trees: sequences with a common prefix share its nodes.

`pack` and `unpack` convert between a beam and its tree. `tree_nodes` converts a packed beam to a proposal. All shapes
depend only on the arguments' shapes, so nothing here synchronizes with the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.speculation.tree import TreeNodes

PADDING = -1


class PackedBeam(NamedTuple):
    """A prefix tree per request with L places: its nodes, parents before children, then padding.

    Nodes are in row-major order of the beam: first all tokens of sequence 0, then from each later sequence the tokens
    after its longest prefix shared with an earlier one. Padding attends only to itself, and no node attends to padding.
    """

    packed_beam: Tensor  # [B, L], -1: padding
    attention_mask: Tensor  # bool [B, L, L], ancestors and self
    position_offsets: Tensor  # int64 [B, L], depth: 0 at the first tokens, and for padding
    unpack_map: Tensor  # int64 [B, M, C], places: packed_beam[unpack_map] == beam


def pack(beam: Tensor, length: int | None = None) -> PackedBeam:
    """The prefix trees of beams [B, M, C]: M sequences of C tokens each. Tokens must not be negative.

    `length`: number of places L, M * C by default. Nodes beyond it are dropped, so the caller should pass an upper
    bound of the nodes: M * (C - 1) + 1 if all sequences begin with the same token.
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
    # Duplicates go to one extra place, which is dropped.
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
    """Values per packed token, [B, L, ...], as values per token of the beam, [B, M, C, ...]."""
    batch = torch.arange(len(x), device=x.device)[:, None, None]
    return x[batch, unpack_map]


def pack_like(values: Tensor, unpack_map: Tensor, length: int, padding: float) -> Tensor:
    """Values per token of the beam, [B, M, C], as values per packed token, [B, L]. Equal prefixes need equal values."""
    out = values.new_full((len(values), length), padding)
    return out.scatter(1, unpack_map.flatten(1), values.flatten(1))


def tree_nodes(packed: PackedBeam, draft_token_num: int, scores: Tensor | None = None) -> TreeNodes:
    """A proposal of `draft_token_num` nodes, including the root. The root is the common first token of all sequences.

    If a tree has more nodes, those with the best `scores` [B, L] are kept. No node may score above its parent, so the
    kept nodes are closed under ancestors. Without scores the first nodes are kept. If a tree has fewer nodes, padding
    is added with score -inf.
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
