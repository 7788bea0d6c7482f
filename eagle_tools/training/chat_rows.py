"""Files of rows where plain text is expected. A chat without the model's chat template is not what the model sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_tools.training.rows.token_rows import is_row_file

KEYS = ("messages", "conversations")  # OpenAI's, ShareGPT's
TEXT_KEYS = ("text", "prompt", "completion")
_PREPARE = "`eagle-server train prepare` makes token rows of them, to train on"


def refuse_chats(file: Path, text: str) -> None:
    """Refuse a file of chat rows (JSON lines, or a JSON list), and a .jsonl file whose rows are texts.

    Other text that has JSON in it is text.

    Raises:
        ValueError: names the file and what to give instead.
    """
    if any(map(_is_chat, _rows(file, text))):
        raise ValueError(f"--data {file}: its rows are chats ({' or '.join(KEYS)}), not plain text; {_PREPARE}")
    if is_row_file(file):
        raise ValueError(f"--data {file}: token rows, not plain text")
    if file.suffix == ".jsonl" and _has_text_row(text):
        raise ValueError(
            f"--data {file}: its rows are JSON with texts in it, not plain text; {_PREPARE}, --preformatted"
        )


def _has_text_row(text: str) -> bool:
    """Whether the first line of a file is an object with a text."""
    row = _parsed(next((line for line in text.splitlines() if line.strip("\ufeff \t")), ""))
    return isinstance(row, dict) and any(isinstance(row.get(key), str) for key in TEXT_KEYS)


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
