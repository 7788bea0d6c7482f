"""A listening Unix socket, for clients of the same machine."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

PROBE_SECONDS = 1.0  # a server that lives accepts at once; one whose backlog is full counts as alive


class UnixListener(socket.socket):
    """Listens on a path. A file that a killed server left there is replaced; `close` removes the server's own.

    Its permissions follow the process's umask: with the usual 022 only its owner can connect.

    Raises:
        OSError: the path cannot be used; `strerror` is one line. EADDRINUSE: another server listens there.
    """

    def __init__(self, path: str, backlog: int) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = Path(path)
        self._file: tuple[int, int] | None = None  # device and inode of this server's file
        try:
            _remove_stale(self._path)
            self.bind(path)
            self._file = _identity(self._path)
            self.listen(backlog)
        except OSError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen on --uds {path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Stop listening. A successor may have its own file at the path already; it stays."""
        super().close()
        if self._file is not None and _identity(self._path) == self._file:
            self._path.unlink(missing_ok=True)
        self._file = None


def _remove_stale(path: Path) -> None:
    """Remove a socket on which nobody listens.

    Raises:
        OSError: somebody listens there, or the file is no socket.
    """
    try:
        mode = path.stat(follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError("there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass
    raise OSError(errno.EADDRINUSE, "another server listens there")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
