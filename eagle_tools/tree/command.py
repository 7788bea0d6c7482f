"""`eagle-server tree`: generate a short text and show the tree of every cycle."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_server.config import parse_args
from eagle_server.config.commands import CommandParser, count, flags_of, temperature
from eagle_tools import require_extra

DEFAULT_PROMPT = "def fibonacci(n):\n"

_DESCRIPTION = """\
Generate a text and show the tree that was drafted in each cycle: its tokens, the drafter's estimate that each is
accepted if its parent is, the path that the target accepted, and the bonus token that the target added.

The options of the model, the drafter and its trees are the same as when serving (`eagle-server --help`);
the default is the embedded demo."""

_EXAMPLES = """\
examples:
  eagle-server tree
  eagle-server tree --prompt "import os" --cycles 3 --out trees
      the first three cycles, also as trees/cycle-1.png, trees/cycle-1.svg and so on
  eagle-server tree --speculative-algorithm NGRAM --prompt-file notes.txt --temperature 0.7
  eagle-server tree --speculative-token-tree "[(0,), (0, 0), (1,)]"

in the terminal `+` marks accepted tokens and `=` the bonus; colours are used only if the output is a terminal"""


def main(argv: Sequence[str]) -> int:
    """Show the trees; returns the exit status. A user's error is one line on stderr and status 2."""
    options, flags = _parser().split(argv, dict.fromkeys(flags_of("server"), "nothing is served here"))
    config = parse_args(flags)
    require_extra("tree")
    from eagle_tools.tree.story import show  # imports torch, which --help does not need

    try:
        show(options, config)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"eagle_server: error: {error}\n")
        return 2
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("eagle-server tree", _DESCRIPTION, _EXAMPLES)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=DEFAULT_PROMPT, help="text to continue (def fibonacci(n): and \\n)")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file with the text to continue")
    parser.add_argument("--max-tokens", type=count, default=32, metavar="N", help="tokens to generate (32)")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (0)")
    parser.add_argument(
        "--cycles", type=count, default=8, metavar="N", help="number of cycles to show, from the first (8)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="draw each shown cycle into this directory, as PNG and SVG"
    )
    return parser
