"""Beams packed into prefix trees: sequences with a common prefix share its nodes.

`pack` makes the tree of a beam. `beam_tree` makes the tree that is verified. All shapes depend
only on the arguments' shapes, so nothing here synchronizes with the device.

Source: Apple's ReDrafter (arXiv 2403.09919), section 3.2, "dynamic tree attention".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.speculation.tree import Tree, build_tree

PADDING = -1


def pack(beam: Tensor, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The prefix trees of beams [B, M, C]: M sequences of C tokens each. Tokens must not be negative.

    Nodes are in row-major order of the beam: first all tokens of sequence 0, then from each later sequence the tokens
    after its longest prefix shared with an earlier one. Padding comes last.

    Args:
        length: number of places L, M * C by default. Nodes beyond it are dropped, so the caller should pass an upper
            bound of the nodes: M * (C - 1) + 1 if all sequences begin with the same token.

    Returns:
        packed_beam [B, L], -1: padding; parents int64 [B, L], places, -1 at first tokens and for padding; unpack_map
        int64 [B, M, C], places: packed_beam[unpack_map] == beam.
    """
    batch, beams, width = beam.shape
    places = beams * width if length is None else length
    device = beam.device
    agree = (beam[:, :, None] == beam[:, None]).cumprod(-1)  # [B, M, M, C], prefixes of two sequences
    first = agree.argmax(2)  # [B, M, C], the first sequence with this prefix
    is_first = (first == torch.arange(beams, device=device)[:, None]).flatten(1)
    order = is_first.cumsum(1) - 1  # the place of each token that is its prefix's first
    column = torch.arange(width, device=device)
    unpack_map = order.gather(1, (first * width + column).flatten(1)).view_as(beam)
    # Duplicates go to one extra place, which is dropped.
    goal = torch.where(is_first & (order < places), order, places)
    source = torch.full((batch, places + 1), PADDING, device=device)
    entries = torch.arange(beams * width, device=device).expand(batch, -1)
    source = source.scatter(1, goal, entries)[:, :places]
    real, entry = source >= 0, source.clamp(min=0)
    packed = torch.where(real, beam.flatten(1).gather(1, entry), PADDING)
    above = unpack_map.flatten(1).gather(1, (entry - 1).clamp(min=0))  # the place of the token before
    return packed, torch.where(real & (entry % width > 0), above, -1), unpack_map


def pack_like(values: Tensor, unpack_map: Tensor, length: int, padding: float) -> Tensor:
    """Values per token of the beam, [B, M, C], as values per packed token, [B, L]. Equal prefixes need equal values."""
    out = values.new_full((len(values), length), padding)
    return out.scatter(1, unpack_map.flatten(1), values.flatten(1))


def beam_tree(beam: Tensor, scores: Tensor, seq_lens: Tensor, nodes: int) -> Tree:
    """The prefix trees of beams with `nodes` nodes. The first token of all sequences is the root.

    If a tree has more nodes, those with the best scores are kept. If it has fewer, padding is added.

    Args:
        beam: int64 [bs, M, C].
        scores: float32 [bs, M, C], of the prefixes that end there. No prefix may score above a shorter one, so the kept
            nodes are closed under ancestors.
        seq_lens: int64 [bs], positions of the roots.
    """
    places = beam.shape[1] * (beam.shape[2] - 1) + 1  # all sequences share the root
    tokens, parents, unpack_map = pack(beam, places)
    worth = pack_like(scores, unpack_map, places, padding=float("-inf"))
    worth = worth.masked_fill(worth.isnan() | (tokens == PADDING), float("-inf"))
    parents, kept = parents.clamp(min=0), min(nodes, places)
    if kept < places:
        ranks = torch.cat([torch.full_like(worth[:, :1], float("inf")), worth[:, 1:]], dim=1)
        chosen = ranks.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
        tokens, worth = tokens.gather(1, chosen), worth.gather(1, chosen)
        parents = torch.searchsorted(chosen, parents.gather(1, chosen))
    missing = (0, nodes - kept)
    return build_tree(
        tokens[:, 0],
        seq_lens,
        F.pad(tokens[:, 1:], missing, value=PADDING),
        F.pad(parents[:, 1:], missing),
        beam.shape[2] - 1,
        F.pad(worth[:, 1:], missing, value=float("-inf")),
    )
