"""Logging of both processes: to stderr, one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

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
    """Log to stderr. `context` gives fields to add to each line, such as the current request's id."""
    handler = logging.StreamHandler()
    whole = style.level.upper() == "DEBUG"
    handler.setFormatter(JsonLines(context) if style.format == "json" else HumanLines(context, whole=whole))
    logging.basicConfig(level=style.level.upper(), handlers=[handler], force=True)


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
