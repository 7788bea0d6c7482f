"""Small files of a model, such as tokenizer.json, in a directory or on Hugging Face."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from eagle_server.hub import NotCached, hub_file

logger = logging.getLogger(__name__)


def find_file(location: str, name: str, *, required: bool = True) -> Path | None:
    """Path of a model's file, None if the model has no such file.

    Raises:
        HubError: the hub has no such model, or it cannot be reached and the file is `required`.
    """
    if Path(location).is_dir():
        file = Path(location) / name
        return file if file.is_file() else None
    try:
        return hub_file(location, name)
    except NotCached as error:
        if required:
            raise
        logger.warning("going on without a file: %s", error)
        return None


def read_json(location: str, name: str) -> dict[str, Any]:
    """The object in an optional JSON file. Empty if the model has no such file.

    Raises:
        ValueError: the file has no JSON object; the message is one line.
    """
    file = find_file(location, name, required=False)
    if file is None:
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} of {location}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name} of {location} should hold a JSON object")
    return values


def read_text(location: str, name: str) -> str | None:
    """The text of an optional file. None if the model has no such file."""
    file = find_file(location, name, required=False)
    return None if file is None else file.read_text(encoding="utf-8")
