"""Tools around the server: benchmarks, training, draft trees in the terminal, chat. A server needs none of them."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import eagle_server

DEMO = Path(eagle_server.__file__).parent / "assets" / "demo"  # the embedded pair, its other heads and held-out prompts
EXTRA = ("httpx", "matplotlib", "rich")  # the packages of the extra `tools`


def require_extra(program: str, packages: Sequence[str] = EXTRA) -> None:
    """End `program` with one line and status 2 if one of these packages of the extra `tools` is missing.

    Raises:
        SystemExit: status 2.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        needs = f"{program} needs {' and '.join(missing)}: pip install 'eagle-server[tools]'"
        sys.stderr.write(f"eagle_server: error: {needs}\n")
        raise SystemExit(2)
