"""Install every client beside this file in an environment of its own: python tests/clients/install.py FOLDER.

Clients pin versions of packages that other clients, and this server, need newer. So none shares an environment.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPTS = sorted(Path(__file__).parent.glob("*_client.py"))


def dependencies(script: Path) -> list[str]:
    """What the inline metadata of a script lists (Python's specification of it was PEP 723)."""
    lines = re.findall(r"^# ([^/].*)$", script.read_text().partition("# ///\n")[0], re.MULTILINE)
    listed: list[str] = tomllib.loads("\n".join(lines))["dependencies"]
    return listed


def install(folder: Path, script: Path) -> None:
    venv.create(folder / script.stem, with_pip=True)
    subprocess.run([folder / script.stem / "bin" / "pip", "install", "--quiet", *dependencies(script)], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="TEST_CLIENTS=FOLDER then shows the tests where they are")
    folder = parser.parse_args().folder
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda script: install(folder, script), SCRIPTS))
