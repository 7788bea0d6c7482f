"""The tree that was found, as a picture: each node shows its accuracy, and its colour shows its worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_tools.training.tree_search.growth import Accuracies, Choice, worth_of
from eagle_tools.tree.canvas import INK, QUIET, Canvas
from eagle_tools.tree.layout import breadths

_RADIUS, _ACROSS, _DOWN = 0.19, 0.46, 0.95  # inches
_HEAD, _FOOT, _LEFT, _RIGHT = 0.95, 0.55, 0.85, 0.35
_LIGHT, _DARK = (0.93, 0.96, 0.94), (0.05, 0.42, 0.27)  # worth 0 and 1
_LEAST_WIDTH = 7.5
_SIZE, _BAR = 8.0, 1.6
_WHITE_ABOVE = 0.4  # worth above which text is white, because the node is dark


def draw_choices(
    choices: Sequence[Choice], accuracies: Accuracies, title: str, subtitle: str, stem: Path
) -> list[Path]:
    """Write stem.png and stem.svg. A node shows the accuracy of its depth and rank in percent; its rank is above."""
    nodes = [(), *sorted(choices, key=lambda choice: (len(choice), choice))]
    place = {node: number for number, node in enumerate(nodes)}
    across = breadths([place[node[:-1]] if node else -1 for node in nodes])
    deepest = max(map(len, nodes))
    span = max(across) * _ACROSS + 2 * _RADIUS
    width = max(_LEFT + span + _RIGHT, _LEAST_WIDTH)
    canvas = Canvas(width, _HEAD + deepest * _DOWN + 2 * _RADIUS + _FOOT)
    margin = _LEFT + (width - _LEFT - _RIGHT - span) / 2 + _RADIUS
    spots = [(margin + x * _ACROSS, _HEAD + _RADIUS + len(node) * _DOWN) for x, node in zip(across, nodes, strict=True)]
    canvas.text(0.35, 0.3, title, 13, weight="bold")
    canvas.text(0.35, 0.58, subtitle, 9, color=QUIET)
    for depth in range(1, deepest + 1):
        canvas.text(0.35, _HEAD + _RADIUS + depth * _DOWN, f"depth {depth}", 8, color=QUIET)
    for node, spot in zip(nodes, spots, strict=True):
        if node:
            _draw_edge(canvas, spots[place[node[:-1]]], spot, worth_of(accuracies, node))
        _draw_node(canvas, node, spot, accuracies)
        if node:  # on the side opposite to the edge
            side = -1 if spots[place[node[:-1]]][0] > spot[0] else 1
            anchor = "right" if side < 0 else "left"
            canvas.text(spot[0] + side * 0.05, spot[1] - _RADIUS - 0.08, str(node[-1]), 6, color=QUIET, ha=anchor)
    _legend(canvas)
    return canvas.save(stem)


def _draw_edge(canvas: Canvas, above: tuple[float, float], below: tuple[float, float], worth: float) -> None:
    (x, y), (end_x, end_y) = above, below
    start, end = y + _RADIUS, end_y - _RADIUS
    bend = (start + end) / 2
    points = [(x, start), (x, bend), (end_x, bend), (end_x, end)]
    canvas.curve(points, edgecolor=_color(worth, darkest=0.8), linewidth=0.8 + 3.2 * worth)


def _draw_node(canvas: Canvas, node: Choice, spot: tuple[float, float], accuracies: Accuracies) -> None:
    x, y = spot
    if not node:
        canvas.disc(x, y, _RADIUS, facecolor=INK, edgecolor=INK)
        canvas.text(x, y, "root", 7, color="white", ha="center")
        return
    worth = worth_of(accuracies, node)
    canvas.disc(x, y, _RADIUS, facecolor=_color(worth), edgecolor=_color(max(worth, 0.35)), linewidth=0.9)
    percent = 100 * accuracies[len(node) - 1][node[-1]]
    ink = "white" if worth > _WHITE_ABOVE else INK
    canvas.text(x, y, f"{percent:.0f}" if percent >= 1 else f"{percent:.1f}", _SIZE, color=ink, ha="center")


def _legend(canvas: Canvas) -> None:
    y, steps = canvas.height - 0.26, 40
    note = "in a node: how often it is accepted when its parent is, in percent; above it: its rank.   "
    canvas.text(0.35, y, note + "colour: how often it is accepted at all", 7.5, color=QUIET)
    left = canvas.width - 0.35 - _BAR
    if left > 0.35 + len(note) * 0.052 + 2.2:
        for step in range(steps):
            color = _color(step / steps)
            canvas.box(left + step * _BAR / steps, y, _BAR / steps + 0.01, 0.1, facecolor=color, edgecolor="none")
        canvas.text(left - 0.05, y, "0", 7, color=QUIET, ha="right")
        canvas.text(left + _BAR + 0.05, y, "1", 7, color=QUIET)


def _color(worth: float, darkest: float = 1.0) -> tuple[float, float, float]:
    """From light to dark, by the square root of the worth, because most nodes are worth little."""
    share = min(worth, 1.0) ** 0.5 * darkest
    red, green, blue = (light + (dark - light) * share for light, dark in zip(_LIGHT, _DARK, strict=True))
    return red, green, blue
