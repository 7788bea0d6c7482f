"""Positions of a tree's nodes in a drawing: no node covers another, and subtrees are as close as possible."""

from __future__ import annotations

from collections.abc import Sequence

GAP = 1.0  # between neighbours of one depth


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node. Parents come before children; the root's parent is -1."""
    levels: list[int] = []
    for parent in parents:
        levels.append(0 if parent < 0 else levels[parent] + 1)
    return levels


def breadths(parents: Sequence[int]) -> list[float]:
    """A coordinate across the tree for each node, from 0. Two nodes of one depth are at least GAP apart.

    A parent is in the middle of its first and last child. Siblings keep their order. Subtrees are moved together until
    their outlines touch, as in E. Reingold and J. Tilford, "Tidier Drawings of Trees" (1981).
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    offsets = [0.0] * len(parents)  # from the parent
    outlines: list[list[tuple[float, float]]] = [[] for _ in parents]  # (least, most) by depth below the node
    for node in range(len(parents) - 1, -1, -1):
        below = _side_by_side([outlines[child] for child in children[node]])
        if below.places:
            middle = (below.places[0] + below.places[-1]) / 2
            for child, place in zip(children[node], below.places, strict=True):
                offsets[child] = place - middle
            below.outline = [(least - middle, most - middle) for least, most in below.outline]
        outlines[node] = [(0.0, 0.0), *below.outline]
    places: list[float] = []
    for node, parent in enumerate(parents):
        places.append(offsets[node] + (places[parent] if parent >= 0 else 0.0))
    least = min(places, default=0.0)
    return [place - least for place in places]


class _Row:
    """Subtrees side by side: the positions of their roots, and the outline of all of them."""

    def __init__(self) -> None:
        self.places: list[float] = []
        self.outline: list[tuple[float, float]] = []


def _side_by_side(outlines: Sequence[Sequence[tuple[float, float]]]) -> _Row:
    row = _Row()
    for outline in outlines:
        apart = (most + GAP - least for (_, most), (least, _) in zip(row.outline, outline, strict=False))
        place = max(apart, default=0.0)
        row.places.append(place)
        both = min(len(row.outline), len(outline))
        joined = [(row.outline[depth][0], outline[depth][1] + place) for depth in range(both)]
        rest = [(least + place, most + place) for least, most in outline[both:]]
        row.outline = joined + row.outline[both:] + rest
    return row
