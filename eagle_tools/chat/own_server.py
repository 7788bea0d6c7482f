"""The server that a chat starts for itself, on a Unix socket that no other user can open."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle_tools.chat.connection import UNIX, ChatFailure, Connection
from eagle_tools.chat.screen import Screen

PROGRAM = (sys.executable, "-m", "eagle_server")
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
PR_SET_PDEATHSIG = 1


class OwnServer:
    """A server process. It ends with this context, and if this process is killed."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str], program: Sequence[str] = PROGRAM) -> None:
        self._command = [*program, *flags]
        self._environment = dict(environment)

    def __enter__(self) -> OwnServer:
        self._directory = tempfile.TemporaryDirectory(prefix="eagle-chat-")  # mode 700
        directory = Path(self._directory.name)
        socket, self._log = directory / "socket", directory / "log"
        self.url = f"{UNIX}{socket}"
        libc = ctypes.CDLL(None)
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*self._command, "--uds", str(socket)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,  # Ctrl-C is for the chat alone
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()

    def wait(self, connection: Connection, screen: Screen, model: str) -> None:
        """Wait until the server generates.

        Raises:
            ChatFailure: it has ended; the message is the last line that it wrote.
        """
        with screen.waiting(f"loading {model}") as line:
            while not connection.is_healthy():
                said = self._log.read_text(errors="replace").strip().splitlines() or [""]
                if self._process.poll() is not None:
                    raise ChatFailure(said[-1].removeprefix("eagle_server: error: ") or "the server has ended")
                line.say(f"loading {model}  {said[-1]}")
                time.sleep(POLL_SECONDS)
