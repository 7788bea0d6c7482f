"""A program in a terminal of its own, and what it shows there."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Self

PATIENCE = 60.0  # seconds; even on a busy machine only a hang takes this long
CTRL_C, CTRL_D = "\x03", "\x04"
_IN_TERMINAL = "import os, sys; os.login_tty(os.dup(0)); os.execvp(sys.argv[1], sys.argv[1:])"
_STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A program whose stdin, stdout and stderr are one pseudo-terminal."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._master, slave = os.openpty()
        own = {**environ, "TERM": "xterm-256color", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *command], stdin=slave, stdout=slave, stderr=slave, env=own
        )
        os.close(slave)
        self._seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
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
        while (status := self._process.poll()) is None:
            assert time.monotonic() < deadline, f"the program goes on: {self._seen!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self._seen += self._read()
        return status

    def _read(self) -> str:
        try:
            return os.read(self._master, 1 << 16).decode(errors="replace")
        except OSError:  # the program has ended
            return ""


def plain(shown: str) -> str:
    """Without colours, and with the line ends of a file."""
    return _STYLES.sub("", shown).replace("\r\n", "\n")
