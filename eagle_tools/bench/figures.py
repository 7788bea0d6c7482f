"""Figures of matplotlib without a display. It is imported only when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def subplots(rows: int, columns: int, *, dpi: int = 100, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, see matplotlib.pyplot.subplots."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, dpi=dpi, **options)


def save(figure: Any, path: Path) -> None:
    """Write the figure and close it."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
