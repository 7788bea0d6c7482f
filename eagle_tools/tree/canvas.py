"""A figure measured in inches, and the shapes that trees are drawn with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

INK, QUIET, FAINT = "#1f2933", "#7b8794", "#cbd2d9"
GREEN, AMBER = "#1b7f4b", "#b7791f"
PALE_GREEN, PALE_AMBER, PALE = "#def7e7", "#fff3d1", "#f5f7fa"
MONO = "DejaVu Sans Mono"  # comes with matplotlib
_ADVANCE = 0.602 / 72  # width of a MONO character in inches, per point of font size


class Canvas:
    """Draws at (x, y) in inches from the upper left corner. `figure` and `axes` are matplotlib's."""

    def __init__(self, width: float, height: float) -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        self.figure = plt.figure(figsize=(width, height))
        self.width, self.height = width, height
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def text(self, x: float, y: float, text: str, size: float, **style: Any) -> None:
        """One line, centred on y and left-aligned by default. Dollar signs do not start a formula."""
        style = {"ha": "left", "va": "center_baseline", "color": INK, "zorder": 4, **style}
        self.axes.text(x, y, text, fontsize=size, parse_math=False, **style)

    def mono(self, x: float, y: float, text: str, size: float, **style: Any) -> None:
        self.text(x, y, drawable(text), size, family=MONO, **style)

    def box(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        """A box with round corners. Its left edge is at x, its vertical middle at y."""
        from matplotlib.patches import FancyBboxPatch

        shape = "round,pad=0,rounding_size=0.06"
        corner = (x, y - height / 2)
        self.axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=shape, **{"zorder": 3, **style}))

    def disc(self, x: float, y: float, radius: float, **style: Any) -> None:
        from matplotlib.patches import Circle

        self.axes.add_patch(Circle((x, y), radius, **{"zorder": 3, **style}))

    def curve(self, points: Sequence[tuple[float, float]], **style: Any) -> None:
        """A Bezier curve from the first of four points to the last."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        codes = [Outline.MOVETO, *[Outline.CURVE4] * 3]
        self.axes.add_patch(PathPatch(Outline(points, codes), fill=False, **{"zorder": 1, **style}))

    def save(self, stem: Path) -> list[Path]:
        """Write stem.png and stem.svg, and close the figure."""
        import matplotlib.pyplot as plt

        paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
        for path in paths:
            self.figure.savefig(path, dpi=160, facecolor="white")
        plt.close(self.figure)
        return paths


def mono_width(text: str, size: float) -> float:
    """Width of a line of MONO in inches."""
    return len(drawable(text)) * size * _ADVANCE


def drawable(text: str) -> str:
    """`text` with escapes for characters without a glyph in MONO."""
    return "".join(c if _has_glyph(c) else f"\\u{ord(c):04x}" for c in text)


@cache
def _has_glyph(character: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    return bool(get_font(findfont(MONO)).get_char_index(ord(character)))
