"""Finished answers on disk, as token rows that `eagle-server train` reads (--record-rows-dir).

A row is a line of JSON. Its mask is 1 for the ids that the target generated:

    {"id": "3f0a", "gen": 0, "input_ids": [1, 5, 9], "loss_mask": [0, 1, 1], "finish_reason": "stop"}

A thread writes, so a slow or full disk costs rows and no request waits for it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import msgspec
from prometheus_client import CollectorRegistry, Counter

logger = logging.getLogger(__name__)

FILES = "rows-*.jsonl"
LOCK = ".lock"
SHARE_OF_FILE = 8  # a file has at most this part of all bytes, so that little is removed at once
LARGEST_FILE = 2**28  # bytes
MOST_WAITING = 2**22  # tokens that wait to be written; as lists they take about 150 MB
CLOSE_SECONDS = 10.0  # for what waits when the server ends


@dataclass
class AnswerRow:
    """One answer while it is generated. `gen` numbers the sequences of a request, which share its id."""

    id: str
    gen: int
    prompt_ids: Sequence[int]
    answer_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    def line(self) -> bytes:
        """The row as a line of JSON."""
        values = {
            "id": self.id,
            "gen": self.gen,
            "input_ids": [*self.prompt_ids, *self.answer_ids],
            "loss_mask": [0] * len(self.prompt_ids) + [1] * len(self.answer_ids),
            "finish_reason": self.finish_reason,
        }
        return msgspec.json.encode(values) + b"\n"


class RowRecorder:
    """Writes rows into files of a directory that has no other writer. Only this user can read the files.

    The files of the directory have at most `max_bytes` together: the oldest are removed.
    """

    def __init__(
        self, directory: Path, max_bytes: int, registry: CollectorRegistry, keys: Collection[str] = ()
    ) -> None:
        """`keys`: the names of API keys whose answers are recorded; none: all answers are.

        Raises:
            ValueError: the directory cannot be written, or another server writes there.
        """
        self._directory, self._keys = directory, frozenset(keys)
        self._max_bytes, self._file_bytes = max_bytes, min(LARGEST_FILE, max_bytes // SHARE_OF_FILE)
        counter = Counter(
            "eagle_server_recorded_rows",
            "Rows of finished answers, written or lost: the disk is full, fails, or is too slow.",
            ("result",),
            registry=registry,
        )
        self._written, self._lost = counter.labels("written"), counter.labels("lost")
        self._files = 0
        self._is_losing = False
        self._waiting = SimpleQueue[list[AnswerRow] | None]()
        self._taken = self._done = 0  # tokens: the event loop adds to the first, the thread to the second
        try:
            self._lock = _locked(directory)
            for file in directory.glob(FILES):
                _cut_torn_line(file)
            self._file = self._next_file()
        except OSError as error:
            raise ValueError(f"--record-rows-dir {directory}: {error.strerror}") from None
        self._thread = Thread(target=self._run, name="rows", daemon=True)
        self._thread.start()
        whose = f"the API keys {', '.join(sorted(keys))}" if keys else "all clients"
        logger.warning(
            "prompts and answers of %s are written to %s, at most %.3g GB; "
            'not those of requests with "store": false, or that fail',
            whose,
            directory,
            max_bytes / 1e9,
        )

    def takes(self, key: str) -> bool:
        """Whether answers of this API key's name are recorded."""
        return not self._keys or key in self._keys

    def record(self, rows: Sequence[AnswerRow]) -> None:
        """Write rows soon, in the thread; those without an answer are left out. It never waits."""
        answered = [row for row in rows if row.answer_ids]
        tokens = sum(row.tokens for row in answered)
        if not answered:
            return
        if self._taken - self._done + tokens > MOST_WAITING:
            self._lose(len(answered), "the disk is too slow")
            return
        self._taken += tokens
        self._waiting.put(answered)

    def close(self) -> None:
        """Write all that waits, and end."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("%s: %d tokens were not written in time", self._directory, self._taken - self._done)
        os.close(self._lock)

    def _run(self) -> None:
        while (rows := self._waiting.get()) is not None:
            for row in rows:
                self._write(row)
                self._done += row.tokens

    def _write(self, row: AnswerRow) -> None:
        try:
            self._append(row.line())
        except OSError as error:
            self._lose(1, error.strerror or str(error))
            return
        self._written.inc()
        if self._is_losing:
            logger.info("%s: rows are recorded again", self._directory)
        self._is_losing = False

    def _lose(self, rows: int, reason: str) -> None:
        """Count lost rows. The log says so once, until rows are written again."""
        self._lost.inc(rows)
        if not self._is_losing:
            logger.error("%s: rows of answers are lost: %s", self._directory, reason)
        self._is_losing = True

    def _append(self, line: bytes) -> None:
        """Write a whole line, or nothing.

        Raises:
            OSError: it cannot be written.
        """
        if len(line) > self._file_bytes:
            raise OSError(errno.EFBIG, f"a row of {len(line)} bytes is larger than a file may be")
        if _size(self._file) + len(line) > self._file_bytes:
            self._file = self._next_file()
        with open(self._file, "ab", buffering=0, opener=_private) as file:
            begin = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(begin)
                raise

    def _next_file(self) -> Path:
        """The path of a new file, after the oldest files were removed that leave no room for it."""
        sizes = {file: _size(file) for file in sorted(self._directory.glob(FILES), key=_age)}
        total = sum(sizes.values()) + self._file_bytes
        for file, size in sizes.items():
            if total <= self._max_bytes:
                break
            file.unlink(missing_ok=True)
            total -= size
            logger.info("%s was removed to make room for newer rows", file)
        self._files += 1
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        return self._directory / f"rows-{began}-{os.getpid()}-{self._files}.jsonl"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _locked(directory: Path) -> int:
    """A lock on the directory, which is made if there is none: an open file.

    Raises:
        OSError: another process has it, or no file can be written there.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise OSError(error.errno, "another server records there; give each a directory of its own") from None
        raise
    return lock


def _cut_torn_line(file: Path) -> None:
    """Cut off the end of a file after its last whole line: a server that was killed may have left it."""
    with file.open("r+b") as opened:
        size = _size(file)
        if size:
            with mmap(opened.fileno(), 0) as view:
                size = view.rfind(b"\n") + 1
            opened.truncate(size)
    if not size:
        file.unlink()


def _size(file: Path) -> int:
    with suppress(FileNotFoundError):  # not written yet, or taken away
        return file.stat().st_size
    return 0


def _age(file: Path) -> float:
    with suppress(FileNotFoundError):
        return file.stat().st_mtime
    return 0.0
