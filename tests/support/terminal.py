"""A program in a terminal of its own, and what it shows there."""

from __future__ import annotations

import os
import pty
import re
import select
import time
from collections.abc import Mapping, Sequence
from typing import Self

PATIENCE = 60.0  # seconds; even on a busy machine only a hang takes this long
CTRL_C, CTRL_D = "\x03", "\x04"
_STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A program whose stdin, stdout and stderr are one pseudo-terminal."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, {**environ, "TERM": "xterm-256color", "COLUMNS": "200"})
        self._seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, words: str) -> str:
        """What is shown from the last call on, up to `words`."""
        deadline = time.monotonic() + PATIENCE
        while words not in self._seen:
            assert time.monotonic() < deadline, f"{words!r} did not come: {self._seen!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self._seen += self._read()
        shown, _, self._seen = self._seen.partition(words)
        return shown

    def status(self) -> int:
        """The exit status, once the program has ended."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, f"the program goes on: {self._seen!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self._seen += self._read()

    def _read(self) -> str:
        try:
            return os.read(self._master, 1 << 16).decode(errors="replace")
        except OSError:  # the program has ended
            return ""


def plain(shown: str) -> str:
    """Without colours, and with the line ends of a file."""
    return _STYLES.sub("", shown).replace("\r\n", "\n")
