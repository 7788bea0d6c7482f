"""The playground names the row of scores that each level of a tree came from, where the drafter has rows."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eagle_server.api.playground import _content

NODE = shutil.which("node")
TREE = {"tokens": ["a", "b", "c", "d"], "parents": [-1, 0, 0, 1], "scores": None, "accepted": [1], "bonus": "e"}
PLACED = """import {{ layout }} from {module};
const {{ labels, nodes }} = layout({tree}, {{ width: 600, height: 300 }}, (text) => 8 * text.length);
console.log(JSON.stringify({{ labels, nodes: nodes.map(({{ x, y, depth, kind }}) => ({{ x, y, depth, kind }})) }}));
"""


def placed(directory: Path, **more: Any) -> dict[str, Any]:
    """What `layout` makes of TREE."""
    module, script = directory / "layout.mjs", directory / "script.mjs"
    module.write_bytes(_content("layout.js"))
    script.write_text(PLACED.format(module=json.dumps(str(module)), tree=json.dumps({**TREE, **more})))
    assert NODE is not None
    return json.loads(subprocess.run([NODE, script], capture_output=True, check=True, text=True).stdout)  # type: ignore[no-any-return]


@pytest.mark.skipif(NODE is None, reason="needs node on the PATH")
def test_a_column_has_the_name_of_its_row_above_it(tmp_path: Path) -> None:
    assert placed(tmp_path)["labels"] == []
    found = placed(tmp_path, hasRows=True)
    labels, nodes = found["labels"], found["nodes"]
    assert [label["text"] for label in labels] == ["row 1", "row 2"]
    assert [label["words"] for label in labels] == [
        'row 1: 2 verified, "b" accepted',
        "row 2: 1 verified, none accepted",
    ]
    for label, depth in zip(labels, (1, 2), strict=True):
        column = [node for node in nodes if node["depth"] == depth]
        assert {node["x"] for node in column} == {label["x"]}
        assert label["y"] < min(node["y"] for node in nodes) - 14  # above the boxes
