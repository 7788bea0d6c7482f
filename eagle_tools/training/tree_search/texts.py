"""Prompts to measure with: the demo's held-out prompts, JSON lists of prompts, or pieces of any text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from eagle_server.text.tokenizer import Tokenizer
from eagle_tools import DEMO
from eagle_tools.training.chat_rows import refuse_chats

DEMO_PROMPTS = DEMO / "prompts.json"
PIECE = 64  # tokens of a prompt cut from a text
_APART = 512  # tokens from the start of one piece to the start of the next


def prompts_of(paths: Sequence[Path] | None, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Up to `count` prompts as token ids, taken evenly from all prompts.

    A .json file must hold a list of strings, each a prompt. Any other file is text, cut into pieces. Directories are
    searched recursively.

    Raises:
        ValueError: a file with the wrong content, or no prompts at all.
        OSError: a file that cannot be read.
    """
    files = [file for path in paths or (DEMO_PROMPTS,) for file in _files(path)]
    prompts = [prompt for file in files for prompt in _prompts(file, tokenizer) if prompt]
    if not prompts:
        raise ValueError(f"--data {' '.join(map(str, paths or ()))}: there is no text in it")
    count = min(count, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _prompts(file: Path, tokenizer: Tokenizer) -> list[list[int]]:
    try:
        text = file.read_text(encoding="utf-8")
        refuse_chats(file, text)
        listed = json.loads(text) if file.suffix == ".json" else None
    except UnicodeDecodeError:
        raise ValueError(f"--data {file}: no UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"--data {file}: no JSON: {error}") from None
    if listed is None:
        tokens = tokenizer.encode(text)
        return [tokens[start : start + PIECE] for start in range(0, len(tokens), _APART)]
    if not isinstance(listed, list) or not all(isinstance(prompt, str) for prompt in listed):
        raise ValueError(f"--data {file}: a JSON list of prompts (strings) is expected")
    return [tokenizer.encode(prompt) for prompt in listed]
