"""Reading a static tree from its option: a name, a list, or a file that holds a list."""

from __future__ import annotations

import os
from pathlib import Path

from eagle_server.speculation.static_tree import DEFAULT, PRESETS, Choices, parse_choices

TOKEN_TREE = "--speculative-token-tree"


def read_choices(text: str | None, option: str) -> Choices:
    """The tree that `option` was given; None is the default one.

    Raises:
        ValueError: not a tree; the message names the option, and the file if there is one.
    """
    text = (text or DEFAULT).strip()
    path = _path_in(text)
    try:
        return parse_choices(text if path is None else path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path}: a text file is expected") from None
    except ValueError as error:
        raise ValueError(f"{option}{'' if path is None else f' {path}'}: {error}") from None


def _path_in(text: str) -> Path | None:
    """The file that the text names; None if the text is a list or a preset's name."""
    if text in PRESETS or text.startswith(("[", "(")):
        return None
    path = Path(text).expanduser()
    return path if os.path.isfile(path) or path.suffix or len(path.parts) > 1 else None
