"""Logging of both processes: to stderr, one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

HUMAN = "%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s"

Context = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class LogStyle:
    """`level` is the lowest severity that is logged."""

    level: str = "info"
    format: Literal["human", "json"] = "human"


def configure_logging(style: LogStyle, context: Context = dict) -> None:
    """Log to stderr. `context` gives fields to add to each line, such as the current request's id."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(context) if style.format == "json" else HumanLines(context))
    logging.basicConfig(level=style.level.upper(), handlers=[handler], force=True)


class HumanLines(logging.Formatter):
    """Text lines. The context follows the message in brackets."""

    def __init__(self, context: Context) -> None:
        super().__init__(HUMAN)
        self._context = context

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        shown = " ".join(f"{name}={value}" for name, value in self._context().items())
        return super().formatMessage(record) + (f" [{shown}]" if shown else "")


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
