"""A cycle's tree in the terminal: drafted and accepted tokens, and the bonus."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from eagle_tools.tree.record import DraftedTree
from eagle_tools.tree.spelling import visible

Spelling = Callable[[int], str]  # the text of a token id

_UNFOLDED = 10_000  # characters per line
ACCEPTED, BONUS, REFUSED, QUIET = "bold green", "bold yellow", "default", "dim"


def cycle_tree(number: int, tree: DraftedTree, spelling: Spelling) -> Tree:
    """The tree for rich. Marks repeat what the colours say: + accepted, = the bonus token."""
    root = Tree(_heading(number, tree, spelling), guide_style=QUIET, highlight=False)
    top = root.add(Text(visible(spelling(tree.tokens[0])), style=ACCEPTED) + Text("  root", style=QUIET))
    branches = {0: top}
    children, accepted = tree.children(), set(tree.path)
    waiting = [0]
    while waiting:
        node = waiting.pop(0)
        for child in children[node]:
            branches[child] = branches[node].add(_label(tree, child, spelling, accepted=child in accepted))
            waiting.append(child)
    bonus = Text.assemble(("= ", BONUS), (visible(spelling(tree.bonus)), BONUS), ("  bonus token", QUIET))
    branches[tree.path[-1]].add(bonus)
    return root


def console_for(file: IO[str]) -> Console:
    """A console that prints to `file`. It folds lines only if `file` is a terminal."""
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=_UNFOLDED)


def print_cycle(console: Console, number: int, tree: DraftedTree, spelling: Spelling) -> None:
    """Print the tree and a blank line."""
    console.print(cycle_tree(number, tree, spelling))
    console.print()


def counts(tree: DraftedTree) -> str:
    """The numbers of drafted, accepted and emitted tokens, in words."""
    drafted, kept = len(tree.tokens) - 1, len(tree.path) - 1
    return f"{drafted} drafted, {kept} accepted + 1 = {len(tree.emitted)} token{'s' if kept else ''}"


def _heading(number: int, tree: DraftedTree, spelling: Spelling) -> Text:
    text = visible("".join(spelling(token) for token in tree.emitted))
    return Text.assemble((f"cycle {number}", "bold"), f"  {counts(tree)}  ", (text, ACCEPTED))


def _label(tree: DraftedTree, node: int, spelling: Spelling, *, accepted: bool) -> Text:
    style = ACCEPTED if accepted else REFUSED
    label = Text.assemble(("+ " if accepted else "  ", style), (visible(spelling(tree.tokens[node])), style))
    chance = tree.chance(node)
    if chance is not None:
        label.append(f"  {chance:.2f}", style=QUIET)
    return label
