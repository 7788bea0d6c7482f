"""What a training writes beside a head: its curves as JSON and PNG, and a card that says how it was made."""

from __future__ import annotations

import json
from pathlib import Path

from eagle_tools.training.loop import History, best_point, plot

CARD, CURVES, PLOT = "README.md", "curves.json", "curves.png"
BESIDE_A_HEAD = (CARD, CURVES, PLOT)
_LENGTHS = ("answers accept length", "T=0 accept length")


def write_head_card(out: Path, history: History, kind: str) -> str:
    """Write card and curves of the head in `out`, whose training is below it. Returns which step's weights it has."""
    (out / CURVES).write_text(json.dumps(history.curves) + "\n")
    plot(history, out / PLOT, kind)
    settings = json.loads((out / "training" / "recipe.json").read_text())
    chosen = _chosen(history)
    rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
    (out / CARD).write_text(f"# A draft head: {kind}\n\n{chosen}\n\n![]({PLOT})\n\n| | |\n|---|---|\n{rows}\n")
    return chosen


def _chosen(history: History) -> str:
    name = next((each for each in _LENGTHS if each in history.curves), None)
    if name is None:
        return "No step was evaluated: the weights are the last ones."
    (step, value), (last, shown) = best_point(history, name), history.curves[name][-1]
    return f"The weights of step {step} were kept: {name} {value:.3f}, the longest; at step {last} {shown:.3f}."
