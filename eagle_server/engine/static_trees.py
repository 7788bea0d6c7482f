"""The numbers of an engine whose trees are a list of choices."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from eagle_server.engine.shape import EngineConfig
from eagle_server.models.checkpoints.load_draft import LoadedDraft
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.speculation.static_tree import (
    DEFAULT,
    PRESETS,
    Choices,
    depth_of,
    parse_choices,
    ranks_of,
    truncated,
)


def given_choices(text: str | None, option: str = "--medusa-choices") -> Choices:
    """What the option says: a name, a list, or a file that holds a list; the default where it says nothing.

    Raises:
        ValueError: it is no tree; the message names the option, and the file if there is one.
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
    """The file that an option's text names, None where it is a list or a name."""
    if text in PRESETS or text.startswith(("[", "(")):
        return None
    path = Path(text).expanduser()
    return path if os.path.isfile(path) or path.suffix or len(path.parts) > 1 else None


def with_choices(shape: EngineConfig, heads: MedusaHeads, text: str | None) -> EngineConfig:
    """`shape` with the tree of --medusa-choices; the default tree is cut to the number of heads.

    Raises:
        ValueError: a tree deeper than there are heads.
    """
    count, choices = heads.config.heads, given_choices(text)
    if text is None:
        choices = truncated(choices, count)
    if depth_of(choices) > count:
        raise ValueError(f"--medusa-choices: a tree of depth {depth_of(choices)} needs as many heads, found {count}")
    return replace(
        shape,
        choices=choices,
        num_steps=depth_of(choices),
        topk=ranks_of(choices),
        draft_token_num=len(choices) + 1,
    )


def with_token_tree(shape: EngineConfig, draft: LoadedDraft | None, text: str | None) -> EngineConfig:
    """`shape` with the tree of --speculative-token-tree, if there is one, for a head that drafts level by level.

    Raises:
        ValueError: no tree; or a draft of another kind.
    """
    if text is None:
        return shape
    if draft is None or draft.kind not in ("EAGLE", "EAGLE3", "NEXTN"):
        found = "there is no draft" if draft is None else f"the files hold a {draft.kind} draft"
        raise ValueError(f"--speculative-token-tree is for EAGLE and MTP heads, but {found}; drop it")
    choices = given_choices(text, "--speculative-token-tree")
    return replace(
        shape,
        choices=choices,
        num_steps=depth_of(choices),
        topk=ranks_of(choices),
        draft_token_num=len(choices) + 1,
    )
