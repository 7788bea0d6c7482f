"""What the documents tell a reader to type, run against the README's server: requests, trees, dry runs and Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import REPOSITORY, Served
from tests.support.doc_commands import ALL_BLOCKS, PYTHON, SHELL, Block

pytestmark = pytest.mark.slow  # a server, and a process for each block

ADDRESS = re.compile(r"(http://)?(127\.0\.0\.1|localhost):30000")


def ends(command: list[str]) -> bool:
    """Whether a command is a request, or one of this package's that ends by itself in seconds."""
    ours = command[0] == "eagle-server" or command[:3] == ["python", "-m", "eagle_server"]
    return command[0] == "curl" or (ours and bool({"tree", "--dry-run", "--version"} & set(command)))


TYPED = [
    block for block in ALL_BLOCKS if block.language == SHELL and not block.needs and all(map(ends, block.commands))
]
SNIPPETS = [block for block in ALL_BLOCKS if block.language == PYTHON and not block.needs]


def output(block: Block, served: Served, directory: Path, *command: str) -> str:
    """What the block prints; its server is the one that runs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "EAGLE_SERVER_CPU_THREADS": "1"}
    (directory / "configs").symlink_to(REPOSITORY / "configs")
    typed = ADDRESS.sub(served.url, block.code)
    done = subprocess.run(
        [*command, typed], cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", TYPED, ids=str)
def test_a_block_of_commands_does_what_it_says(block: Block, served: Served, tmp_path: Path) -> None:
    shown = output(block, served, tmp_path, "bash", "-euo", "pipefail", "-c")
    assert shown.strip()
    assert '"error"' not in shown


@pytest.mark.parametrize("block", SNIPPETS, ids=str)
def test_a_block_of_python_runs(block: Block, served: Served, tmp_path: Path) -> None:
    output(block, served, tmp_path, sys.executable, "-c")


def holds(shown: Any, found: Any) -> bool:
    """Whether `found` has all that a document shows of it. Numbers are shown with two decimals."""
    if isinstance(shown, dict):
        return all(name in found and holds(value, found[name]) for name, value in shown.items())
    if isinstance(shown, list):
        return len(shown) == len(found) and all(map(holds, shown, found))
    return bool(shown == (round(found, 2) if isinstance(shown, float) else found))


def test_the_quick_starts_answer_is_what_the_server_gives(served: Served, tmp_path: Path) -> None:
    blocks = [block for block in ALL_BLOCKS if block.page.name == "index.md"]
    (place,) = [at for at, block in enumerate(blocks) if block.language == "json"]
    found = json.loads(output(blocks[place - 1], served, tmp_path, "bash", "-euo", "pipefail", "-c"))
    assert holds(json.loads(blocks[place].code), found), found


def test_there_are_blocks_of_each_kind() -> None:
    programs = {tuple(command[:4]) for block in TYPED for command in block.commands}
    assert {program[0] for program in programs} >= {"curl", "python"}
    assert ("python", "-m", "eagle_server", "tree") in programs
    assert any("LLM(" in block.code for block in SNIPPETS)
    assert any("OpenAI(" in block.code for block in SNIPPETS)
