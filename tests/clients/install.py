"""Install every client beside this file in an environment of its own: python tests/clients/install.py FOLDER.

Clients pin versions of packages that other clients, and this server, need newer. So none shares an environment.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
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


def install(folder: Path, script: Path) -> bool:
    """Whether it could be installed. Otherwise its environment is removed, so that its test is skipped."""
    environment = folder / script.stem
    venv.create(environment, with_pip=True)
    command = [environment / "bin" / "pip", "install", "--quiet", *dependencies(script)]
    done = subprocess.run(command, check=False).returncode == 0
    if not done:
        shutil.rmtree(environment)
    return done


if __name__ == "__main__":
    names = [script.stem for script in SCRIPTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="TEST_CLIENTS=FOLDER then shows the tests where they are")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(names)} (not given: all)")
    parsed = parser.parse_args()
    if unknown := set(parsed.clients) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [script for script in SCRIPTS if script.stem in (parsed.clients or names)]
    with ThreadPoolExecutor(2) as pool:
        sys.exit(not all(list(pool.map(lambda script: install(parsed.folder, script), chosen))))
