"""The table of operations in docs/design/gpu.md: `python -m tests.support.operations` writes it."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import eagle_server.ops
from eagle_server.ops.dispatch import FITS, OPERATIONS

PAGE = Path(__file__).parents[2] / "docs" / "design" / "gpu.md"
BEGIN = "<!-- operations: python -m tests.support.operations -->"
END = "<!-- end of operations -->"
COLUMNS = {"native": "CPU: native", "triton": "GPU: Triton", "flashinfer": "GPU: FlashInfer"}


def load() -> None:
    """Import all modules of operations."""
    for found in pkgutil.walk_packages(eagle_server.ops.__path__, "eagle_server.ops."):
        importlib.import_module(found.name)


def table() -> str:
    """The section of the page."""
    load()
    assert COLUMNS.keys() == FITS.keys()
    rows = [["operation", "file", *COLUMNS.values()], ["---"] * (2 + len(COLUMNS))]
    for name, operation in sorted(OPERATIONS.items(), key=lambda each: (each[1].__module__, each[0])):
        places = dict(operation.conditions)
        cells = ["–" if kind not in places else "yes" if places[kind] is None else "some" for kind in COLUMNS]
        file = operation.__module__.removeprefix("eagle_server.").replace(".", "/")
        rows.append([f"`{name}`", f"`{file}.py`", *cells])
    return "\n".join((BEGIN, *(f"| {' | '.join(cells)} |" for cells in rows), END))


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + table() + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
