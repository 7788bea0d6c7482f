"""The blocks of code in the documents, and the commands in those that are for a shell."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(chain((ROOT / "README.md", ROOT / "CONTRIBUTING.md"), (ROOT / "docs").rglob("*.md")))
SHELL, PYTHON = "bash", "python"
# Before a block that no test can run: what it needs. `<!-- needs: gpu -->`
NEEDS = re.compile(r"<!-- needs: (\w+) -->")
WHAT_IS_NEEDED = {
    "gpu": "an NVIDIA GPU",
    "root": "an administrator's rights, and packages of the system",
    "service": "a program besides this one, such as Prometheus",
}


@dataclass(frozen=True)
class Block:
    """A block of code. An indented one is for a shell, a fenced one names its language."""

    page: Path
    line: int  # of its first line of code, from 1
    language: str
    code: str
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without variables that are set before it; pipes and `&&` separate commands."""
        found = list[list[str]]()
        for line in self.code.replace("\\\n", " ").splitlines():
            words = shlex.shlex(line, posix=True, punctuation_chars="&|;")
            words.whitespace_split = True
            command = list[str]()
            for word in chain(words, [";"]):
                if set(word) <= set("&|;"):
                    found += [command] if command else []
                    command = []
                elif command or not re.match(r"[A-Z_]+=", word):
                    command.append(word)
        return found


def blocks(page: Path) -> list[Block]:
    found = list[Block]()
    lines = page.read_text(encoding="utf-8").splitlines()
    before, at = "", 0  # the last line of prose
    while at < len(lines):
        fence = re.match(r"( *)(```+)(\w*)$", lines[at])
        indented = (
            lines[at].startswith("    ") and not lines[at - 1].strip() and not re.match(r" *([-*]|\d+\.) ", before)
        )
        if not fence and not indented:
            before, at = lines[at] if lines[at].strip() else before, at + 1
            continue
        if fence:
            start, end = at + 1, lines.index(fence[1] + fence[2], at + 1)
            at = end + 1
        else:
            start = at
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            end = at
        needs = NEEDS.fullmatch(before)
        code = "\n".join(line.removeprefix(fence[1] if fence else "    ") for line in lines[start:end]).rstrip()
        found.append(Block(page, start + 1, fence[3] if fence else SHELL, code, needs[1] if needs else None))
        before = ""
    return found


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
