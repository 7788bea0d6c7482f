"""Files that appear complete or not at all, also after a loss of power and if several processes write them at once."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_UNFINISHED = ".unfinished-"
_LEFT_SECONDS = 3600.0


def put_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new file, and put it in the place of `path`. Others may read it, its owner may write it.

    Raises:
        OSError: the directory cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as unfinished:
        file = Path(unfinished) / path.name
        write(file)
        file.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
        _sync(file)
        file.replace(path)
    _sync(path.parent)


def remove_unfinished(directory: Path) -> None:
    """Remove what processes left there that were killed in `put_whole`: nobody has written to it for an hour."""
    for unfinished in directory.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):  # its process has finished, or another one removes it
            newest = max(path.stat().st_mtime for path in (unfinished, *unfinished.iterdir()))
            if newest < time.time() - _LEFT_SECONDS:
                shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
