"""Files that appear complete or not at all, also after a loss of power and if several processes write them at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def put_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new file, and put it in the place of `path`. Others may read it, its owner may write it.

    Raises:
        OSError: the directory cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as unfinished:
        file = Path(unfinished) / path.name
        write(file)
        file.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
        _sync(file)
        file.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
