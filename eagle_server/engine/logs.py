"""Logging of both processes: to stderr, one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

HUMAN = "%(asctime)s %(message)s"
WARNING = "%(asctime)s %(levelname)s: %(message)s"
DEBUG = "%(asctime)s.%(msecs)03d %(levelname)s %(processName)s %(name)s: %(message)s"

# What line splitters take for line ends, except the line feed, which messages and tracebacks of several lines contain.
LINE_ENDS = {ord(end): repr(end)[1:-1] for end in "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"}

Context = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class LogStyle:
    """`level` is the lowest severity that is logged."""

    level: str = "info"
    format: Literal["human", "json"] = "human"


def configure_logging(style: LogStyle, context: Context = dict) -> None:
    """Log to stderr, and never wait for who reads it.

    `context` gives fields to add to each line, such as the id of the current request.
    """
    handler = logging.StreamHandler(_stderr())
    whole = style.level.upper() == "DEBUG"
    handler.setFormatter(JsonLines(context) if style.format == "json" else HumanLines(context, whole=whole))
    logging.basicConfig(level=style.level.upper(), handlers=[handler], force=True)


class _Pipe:
    """A pipe as a stream of lines. Lines that do not fit, because nobody reads, are dropped; the next one counts them.

    The pipe is opened again, because whether writing waits is a property that all processes with stderr share.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._dropped = 0

    def write(self, text: str) -> None:
        """Each call is one line."""
        if self._dropped:
            text = f"{self._dropped} lines of the log were dropped: nobody read them\n{text}"
        rest = text.encode(errors="backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BlockingIOError:
            self._dropped += 1
        else:
            self._dropped = 0

    def flush(self) -> None:
        """Nothing is kept."""


def _stderr() -> TextIO | _Pipe:
    """stderr; not to wait for its reader if it is a pipe."""
    try:
        file = sys.stderr.fileno()
        return _Pipe(f"/proc/self/fd/{file}") if stat.S_ISFIFO(os.fstat(file).st_mode) else sys.stderr
    except OSError:  # it is no file, or the system has no such names
        return sys.stderr


class HumanLines(logging.Formatter):
    """Text lines. The context follows the message in brackets. `whole`: with milliseconds, process and module.

    All line ends but the line feed are escaped as by repr.
    """

    def __init__(self, context: Context, *, whole: bool = False) -> None:
        super().__init__(DEBUG if whole else HUMAN, datefmt="%H:%M:%S")
        self._context, self._whole = context, whole
        self._warning = logging.PercentStyle(WARNING)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(LINE_ENDS)

    def formatMessage(self, record: logging.LogRecord) -> str:
        plain = self._whole or record.levelno == logging.INFO
        text = super().formatMessage(record) if plain else self._warning.format(record)
        shown = " ".join(f"{name}={value}" for name, value in self._context().items())
        return text + (f" [{shown}]" if shown else "")


class JsonLines(logging.Formatter):
    """One object per line: time (RFC 3339, UTC), level, process, logger, message, the context, the line's own fields.

    A line gets its own fields by `extra={"fields": {...}}` in the logging call.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": record.processName,
            "logger": record.name,
            "message": record.getMessage(),
            **self._context(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)
