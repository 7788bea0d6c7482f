"""Static trees: Medusa's choices and vLLM's speculative_token_tree, as lists of nodes and as tensors.

A tree is a list of choices, one per node. Choice (i, j, ..) is the node reached by rank i at depth 1, then rank j at
depth 2, and so on. Medusa takes rank i from head 0 and rank j from head 1. An EAGLE head drafts level by level: (i, j)
is the j-th best child of the i-th best child of the root. Only nodes with children are fed to an EAGLE head, and only
these have slots in the draft's window, in the order of the nodes.
"""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle_server.algorithms import DEEPEST_TREE

Choices = tuple[tuple[int, ...], ...]

_SHOWN = 60  # error texts show this many characters of a wrong value
_MOST_NODES = 1023  # limited because a tree is verified in one forward

# One word per node, one digit per rank. Source: Medusa (arXiv 2401.10774) and its published code.
_PUBLISHED = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 "
        "005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
    "vicuna_7b_stage1": (
        "0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 "
        "020 011 004 60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51"
    ),
    "vicuna_7b_stage1_ablation": (
        "0 00 1 000 01 10 2 02 001 3 03 010 20 002 04 4 0000 100 11 003 020 05 5 30 011 06 6 004 12 0001 40 005 "
        "07 08 030 0010 101 7 200 006 21 012 50 021 09 0002 040 8 13 007 0100 110 60 9 008 009 050 0020 102 013 "
        "0003 300 31"
    ),
    "vicuna_7b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7 "
        "030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31 "
        "0020 70 14"
    ),
    "vicuna_13b_stage1": (
        "0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 004 "
        "13 011 005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 23 16"
    ),
    "vicuna_13b_stage2": (
        "0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 "
        "0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013 "
        "102 0011 300 1000"
    ),
    "vicuna_33b_stage1": (
        "0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 14 "
        "60 020 31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021"
    ),
    "vicuna_33b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 "
        "030 005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 009 "
        "31 102 22"
    ),
    "zephyr_stage2": (
        "0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011 "
        "004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 "
        "23"
    ),
}


def published_choices(name: str) -> Choices:
    """A published tree, in the published order of nodes."""
    return tuple(tuple(int(digit) for digit in word) for word in _PUBLISHED[name].split())


PRESETS: dict[str, Choices] = {name: published_choices(name) for name in _PUBLISHED}


def read_choices(text: str, option: str) -> Choices:
    """The tree that the option's text describes.

    Raises:
        ValueError: not a tree; the message names the option, and the file if there is one.
    """
    text = text.strip()
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


def parse_choices(text: str) -> Choices:
    """The tree from the name of a preset, or from a list in Python's syntax: "[(0,), (0, 0), (1,)]".

    Raises:
        ValueError: the text is neither; or the list is empty or too long, a rank is not an integer >= 0, a node is
            listed twice, or a node's parent is missing.
    """
    if text.strip() in PRESETS:
        return PRESETS[text.strip()]
    try:
        listed = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        listed = None
    if not isinstance(listed, list | tuple):
        raise ValueError(
            f"{_shortened(text)!r} is neither a list like [(0,), (0, 0), (1,)], nor a file that holds one, "
            f"nor one of {', '.join(PRESETS)}"
        )
    return checked(listed)


def checked(listed: object) -> Choices:
    """A list of nodes as `Choices`. Raises ValueError as in `parse_choices`."""
    if not isinstance(listed, list | tuple) or not 0 < len(listed) <= _MOST_NODES:
        raise ValueError(f"a list of 1 to {_MOST_NODES} nodes is expected")
    for node in listed:
        if not isinstance(node, list | tuple) or not node or any(type(rank) is not int for rank in node):
            raise ValueError(f"{_shortened(repr(node))}: a node is a tuple of ranks, like (0, 2)")
        if min(node) < 0:
            raise ValueError(f"{tuple(node)}: ranks count from 0")
        if len(node) > DEEPEST_TREE:
            raise ValueError(f"{_shortened(repr(node))}: a tree has at most {DEEPEST_TREE} levels")
    choices = tuple(tuple(node) for node in listed)
    known = set[tuple[int, ...]]()
    for node in choices:
        if node in known:
            raise ValueError(f"{node} is listed twice")
        known.add(node)
    for node in choices:
        if len(node) > 1 and node[:-1] not in known:
            raise ValueError(f"{node} has no parent: {node[:-1]} is not in the list")
    return choices


def truncated(choices: Choices, steps: int) -> Choices:
    """The nodes down to depth `steps`."""
    return tuple(node for node in choices if len(node) <= steps)


def steps_of(choices: Choices) -> int:
    """Depth of the deepest node, which is the number of Medusa heads that the tree uses."""
    return max(map(len, choices))


def ranks_of(choices: Choices) -> int:
    """The highest rank + 1: the tree needs this many top tokens per Medusa head, or per fed node of an EAGLE head."""
    return 1 + max(map(max, choices))


def sorted_choices(choices: Choices | list[tuple[int, ...]] | list[list[int]]) -> list[tuple[int, ...]]:
    """The choices sorted by depth, then by ranks. Parents come before their children."""
    return sorted((tuple(choice) for choice in choices), key=lambda choice: (len(choice), choice))


def choice_parents(choices: Choices | list[tuple[int, ...]]) -> list[int]:
    """The node number of each sorted choice's parent. The root has number 0, sorted choice i has number i + 1."""
    nodes = sorted_choices(choices)
    number = {(): 0, **{choice: i + 1 for i, choice in enumerate(nodes)}}
    return [number[choice[:-1]] for choice in nodes]


@dataclass(frozen=True)
class Level:
    """The nodes of one depth. A draft step feeds only the nodes that have children."""

    picks: Tensor  # int64 [n], indices into the children [rows of the previous step, topk], flat: row * topk + rank
    fed: Tensor  # int64 [rows], the nodes of this level that have children
    parents: Tensor  # int64 [rows], the row of each fed node's parent in the previous step
    sees: Tensor  # bool [rows, window], window slots of each fed node's ancestors and its own
    start: int  # the first window slot of this level


@dataclass(frozen=True)
class StaticTree:
    """A tree of n nodes without the root, sorted by depth and ranks. All requests share it."""

    levels: tuple[Level, ...]
    parents: Tensor  # int64 [n], node numbers, the root is 0
    topk: int
    window: int  # window slots, one per node with children
    slot_depths: Tensor  # int64 [window], depth of each slot's node, 0 for children of the root

    @property
    def size(self) -> int:
        return len(self.parents)

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of nodes per request that each draft step feeds."""
        return tuple(len(level.fed) for level in self.levels[:-1])


def tree_attention_bias(choices: Choices | list[tuple[int, ...]]) -> Tensor:
    """float32 [n + 1, n + 1], the root first, then sorted by depth and ranks: 0 at ancestors and self, else -inf."""
    nodes = [(), *sorted_choices(choices)]
    sees = [[below[: len(above)] == above for above in nodes] for below in nodes]
    return torch.zeros(len(nodes), len(nodes)).masked_fill(~torch.tensor(sees), float("-inf"))


def static_tree(choices: Choices, device: torch.device) -> StaticTree:
    """The tensors of a tree. It must contain the parent of every node (see `checked`)."""
    nodes, topk = sorted_choices(choices), ranks_of(choices)
    inner = {node[:-1] for node in nodes}
    fed = [node for node in nodes if node in inner]
    visible = tree_attention_bias(choices)[1:, 1:] == 0
    slots = [nodes.index(node) for node in fed]
    sees = visible[slots][:, slots].to(device)
    levels, start = list[Level](), 0
    before: list[tuple[int, ...]] = [()]  # draft-extend has fed the root
    for depth in range(1, max(map(len, nodes)) + 1):
        here = [node for node in nodes if len(node) == depth]
        rows = [node for node in here if node in inner]
        levels.append(
            Level(
                picks=_ints([before.index(node[:-1]) * topk + node[-1] for node in here], device),
                fed=_ints([here.index(node) for node in rows], device),
                parents=_ints([before.index(node[:-1]) for node in rows], device),
                sees=sees[start : start + len(rows)],
                start=start,
            )
        )
        before, start = rows, start + len(rows)
    depths = _ints([len(node) - 1 for node in fed], device)
    return StaticTree(tuple(levels), _ints(choice_parents(choices), device), topk, len(fed), depths)


def _ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
