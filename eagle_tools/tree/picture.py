"""A cycle's tree as a picture: tokens in boxes from left to right, the accepted path and the bonus highlighted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle_tools.tree.canvas import (
    AMBER,
    FAINT,
    GREEN,
    INK,
    PALE,
    PALE_AMBER,
    PALE_GREEN,
    QUIET,
    Canvas,
    mono_width,
)
from eagle_tools.tree.layout import breadths, depths
from eagle_tools.tree.record import DraftedTree
from eagle_tools.tree.spelling import visible
from eagle_tools.tree.terminal import counts

_SIZE, _SMALL = 10.0, 7.0  # points
_ROW, _BOX = 0.36, 0.27  # inches: from one node to the next, and a box's height
_GAP, _MARGIN, _HEAD, _FOOT = 0.62, 0.35, 0.85, 0.5
_PADDING = 0.08
_LONGEST = 18  # characters of a token
_LEAST_WIDTH = 7.0


@dataclass(frozen=True)
class _Box:
    """The box of one node. `chance` is the drafter's probability, in small print after the token."""

    text: str
    chance: str
    kind: str  # root, accepted, refused or bonus

    @property
    def width(self) -> float:
        behind = mono_width(self.chance, _SMALL) + _PADDING if self.chance else 0.0
        return mono_width(self.text, _SIZE) + behind + 2 * _PADDING


_STYLES = {  # fill, edge, text
    "root": (INK, INK, "white"),
    "accepted": (PALE_GREEN, GREEN, INK),
    "bonus": (PALE_AMBER, AMBER, INK),
    "refused": (PALE, FAINT, QUIET),
}


def draw_cycle(number: int, tree: DraftedTree, spelling: Callable[[int], str], stem: Path) -> list[Path]:
    """Write stem.png and stem.svg."""
    order, parents = _ordered(tree)
    boxes = [_box(tree, node, spelling) for node in order]
    level, across = depths(parents), breadths(parents)
    lefts = _columns(boxes, level)
    right = max(lefts[depth] + box.width for box, depth in zip(boxes, level, strict=True))
    heading = f"cycle {number}: {counts(tree)}"
    text = visible("".join(spelling(token) for token in tree.emitted))
    width = max(right + _MARGIN, _LEAST_WIDTH, mono_width(text, _SIZE) + 2 * _MARGIN)
    canvas = Canvas(width, _HEAD + (max(across) + 1) * _ROW + _FOOT)
    canvas.text(_MARGIN, 0.28, heading, 12, weight="bold")
    canvas.mono(_MARGIN, 0.56, text, _SIZE, color=GREEN)
    heights = [_HEAD + (place + 0.5) * _ROW for place in across]
    for place, (box, depth, y) in enumerate(zip(boxes, level, heights, strict=True)):
        _draw_box(canvas, box, lefts[depth], y)
        if place:
            above = parents[place]
            start = lefts[level[above]] + boxes[above].width
            _draw_edge(canvas, (start, heights[above]), (lefts[depth], y), box.kind)
    _legend(canvas)
    return canvas.save(stem)


def _ordered(tree: DraftedTree) -> tuple[list[int], list[int]]:
    """Nodes by depth, most probable siblings first, the bonus (-1) last; and the places of their parents."""
    children, order, parents = tree.children(), [0], [-1]
    for place, node in enumerate(order):  # the list grows while it is read
        order.extend(children[node])
        parents.extend([place] * len(children[node]))
    return [*order, -1], [*parents, order.index(tree.path[-1])]


def _box(tree: DraftedTree, node: int, spelling: Callable[[int], str]) -> _Box:
    if node < 0:
        return _Box(visible(spelling(tree.bonus), _LONGEST), "", "bonus")
    chance = tree.chance(node)
    kind = "root" if node == 0 else "accepted" if node in tree.path else "refused"
    return _Box(visible(spelling(tree.tokens[node]), _LONGEST), "" if chance is None else f"{chance:.2f}", kind)


def _columns(boxes: list[_Box], level: list[int]) -> list[float]:
    """The left edge of every depth."""
    lefts = [_MARGIN]
    for depth in range(max(level)):
        widest = max(box.width for box, box_depth in zip(boxes, level, strict=True) if box_depth == depth)
        lefts.append(lefts[-1] + widest + _GAP)
    return lefts


def _draw_box(canvas: Canvas, box: _Box, left: float, y: float) -> None:
    fill, edge, ink = _STYLES[box.kind]
    dashes = (0, (3, 2)) if box.kind == "bonus" else "solid"
    heavy = 0.8 if box.kind == "refused" else 1.5
    canvas.box(left, y, box.width, _BOX, facecolor=fill, edgecolor=edge, linewidth=heavy, linestyle=dashes)
    canvas.mono(left + _PADDING, y, box.text, _SIZE, color=ink)
    if box.chance:
        canvas.mono(left + box.width - _PADDING, y, box.chance, _SMALL, color=QUIET, ha="right")


def _draw_edge(canvas: Canvas, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    color = _STYLES[kind][1]
    middle = end[0] - _GAP / 2  # edges bend in the gap before a column, after the widest box of the previous one
    points = [start, (max(middle, start[0]), start[1]), (middle, end[1]), end]
    dashes = (0, (3, 2)) if kind == "bonus" else "solid"
    width, order = (0.8, 1) if kind == "refused" else (2.0, 2)
    canvas.curve(points, edgecolor=color, linewidth=width, linestyle=dashes, zorder=order)


def _legend(canvas: Canvas) -> None:
    y, left = canvas.height - 0.24, _MARGIN
    for kind, label in (
        ("accepted", "accepted"),
        ("bonus", "bonus token"),
        ("refused", "refused"),
    ):
        fill, edge, _ = _STYLES[kind]
        canvas.box(left, y, 0.16, 0.12, facecolor=fill, edgecolor=edge, linewidth=1.0)
        canvas.text(left + 0.23, y, label, 8, color=QUIET)
        left += 0.23 + len(label) * 0.062 + 0.2
