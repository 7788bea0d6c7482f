"""The table of families in docs/models.md: each cell by running a small model, each family of the registry a row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_server.ops.native.library import available
from tests.lossless.families import BEGIN, END, OTHERS, PAGE, names, row, table

QUICK = {"Qwen2ForCausalLM"}
SECTION = BEGIN + PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0] + END
ROWS = {
    cells[0]: cells
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if "|" in line)
}


def test_the_table_has_a_row_for_every_family_and_names_what_was_compared() -> None:
    head, rule, *rows = ROWS.values()
    assert len(rows) == len(names())
    assert table(rows) == SECTION, "write it again: python -m tests.lossless.families"


@pytest.mark.skipif(not available(torch.device("cpu"), torch.float32), reason="the table is of native kernels")
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.deep,)) for name in names()]
)
def test_every_cell_is_what_a_small_model_of_the_family_does(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    cells = row(architecture, tmp_path)
    assert ROWS[cells[0]] == cells, "write it again: python -m tests.lossless.families"
    assert architecture == OTHERS or architecture.startswith(cells[0])
