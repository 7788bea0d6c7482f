"""The demo's prompts: the beginnings of definitions in the held-out files, with the lines before them."""

from __future__ import annotations

import json
from pathlib import Path

from eagle_tools.training.corpus import standard_library_files

LINES_BEFORE = 14
PER_FILE = 4


def held_out_prompts(count: int) -> list[str]:
    """Up to `count` prompts, at most four per file. Each ends with a `def` line that the model was not trained on."""
    prompts: list[str] = []
    for path in standard_library_files()[1]:
        lines = path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if line.lstrip().startswith("def ") and i >= LINES_BEFORE]
        step = max(1, len(starts) // PER_FILE)
        prompts.extend("".join(lines[i - LINES_BEFORE : i + 1]) for i in starts[::step][:PER_FILE])
    step = max(1, len(prompts) // count)
    return prompts[::step][:count]


def write_prompts(path: Path, count: int = 32) -> None:
    """Write the prompts as a JSON list, for the benchmark and the tests."""
    path.write_text(json.dumps(held_out_prompts(count), indent=1) + "\n")
