"""Files of chats. Trainings read plain text, and a chat without the model's chat template is not what it sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEYS = ("messages", "conversations")  # OpenAI's, ShareGPT's


def refuse_chats(file: Path, text: str) -> None:
    """Refuse a file of chat rows: JSON lines, or a JSON list. Other text that has JSON in it is text.

    Raises:
        ValueError: names the file and what to give instead.
    """
    if any(map(_is_chat, _rows(file, text))):
        raise ValueError(
            f"--data {file}: its rows are chats ({' or '.join(KEYS)}), not supported yet: give plain text files"
        )


def _rows(file: Path, text: str) -> Iterator[Any]:
    """The rows of JSON lines or of a JSON list that may be chats."""
    begin = text.lstrip("\ufeff \t\r\n")[:1]
    if begin not in ("[", "{") or not any(f'"{key}"' in text for key in KEYS):
        return
    whole = _parsed(text)
    if isinstance(whole, list):
        yield from whole
        return
    if whole is not None and file.suffix == ".json":  # one object, such as a package.json
        return
    lines = (line for line in text.lstrip("\ufeff").splitlines() if line.strip())
    first = _parsed(next(lines))
    if not isinstance(first, dict):  # no JSON lines
        return
    yield first
    yield from (_parsed(line) for line in lines if any(f'"{key}"' in line for key in KEYS))


def _parsed(text: str) -> Any:
    """None if it is no JSON."""
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None


def _is_chat(row: Any) -> bool:
    """Whether a row has a list of messages with their speakers."""
    if not isinstance(row, dict):
        return False
    lists = [value for key in KEYS if isinstance(value := row.get(key), list) and value]
    return any(isinstance(each, dict) and ("role" in each or "from" in each) for value in lists for each in value)
