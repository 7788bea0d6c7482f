"""The benchmark of single matrices: that it runs in every format, and which bytes it counts. Seconds are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_server.ops.native.library import available
from eagle_tools.bench import linears

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


def test_every_format_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "TOGETHER", 100_000)
    monkeypatch.setattr(linears, "READ", 1000)
    monkeypatch.setattr(linears, "set_threads", lambda *_, **__: None)
    out = tmp_path / "numbers.json"
    assert linears.main(["--sizes", "32x512", "--rows", "1", "3", "--rounds", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["format"], row["rows"]) for row in rows] == [(form, n) for form in linears.EVERY for n in (1, 3)]
    bits = {row["format"]: 8 * row["bytes"] / 32 / 512 for row in rows}
    assert (bits["bfloat16"], bits["Q8_0"], bits["Q4_0"], bits["Q4_K"], bits["Q6_K"]) == (16, 8.5, 4.5, 4.625, 6.625)
