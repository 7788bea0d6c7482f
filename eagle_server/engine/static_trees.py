"""The numbers of an engine whose trees are a list of choices."""

from __future__ import annotations

from dataclasses import replace

from eagle_server.engine.shape import Shape
from eagle_server.models.load_draft import LoadedDraft
from eagle_server.models.medusa_head import MedusaHeads
from eagle_server.speculation.medusa_choices import (
    DEFAULT,
    Choices,
    depth_of,
    parse_choices,
    ranks_of,
    truncated,
)


def given_choices(text: str | None, option: str = "--medusa-choices") -> Choices:
    """What the option says; the default where it says nothing.

    Raises:
        ValueError: it is no tree; the message names the option.
    """
    try:
        return parse_choices(text or DEFAULT)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def with_choices(shape: Shape, heads: MedusaHeads, text: str | None) -> Shape:
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


def with_token_tree(shape: Shape, draft: LoadedDraft | None, text: str | None) -> Shape:
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
