"""Parsing for commands other than serve. They have their own options and take the server's flags too."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence

from eagle_server.config.sources import ALIASES, OPTIONS, OneLineParser, unknown_name

WITHOUT_SECTION = ("--config", "--version", "--help-all", "--dry-run")


class CommandParser(OneLineParser):
    """Parses a command's own options. An error is one line and exit status 2."""

    def __init__(self, prog: str, description: str, epilog: str = "", *, first: str = "") -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog=prog,
            usage=f"%(prog)s {first}[options] [options of eagle-server]",
            description=description,
            epilog=epilog,
            formatter_class=raw,
            allow_abbrev=False,
        )

    def split(self, argv: Sequence[str], refused: Mapping[str, str]) -> tuple[argparse.Namespace, list[str]]:
        """The command's options, and the server's flags unparsed.

        `refused` maps server flags that would have no effect here to the reason: "--port": "nothing is served".

        Raises:
            SystemExit: status 0 after --help, status 2 after one line if anything is wrong.
        """
        options, flags = self.parse_known_args(argv)
        everything = {*self._option_string_actions, *WITHOUT_SECTION, *flags_of(*(o.section for o in OPTIONS.values()))}
        for flag in flags:
            name = flag.partition("=")[0]
            if name in refused:
                self.error(f"{name}: {refused[name]}; drop it")
            if name.startswith("--") and name not in everything:
                self.error(str(unknown_name("flag", name, everything)))
        return options, flags


def flags_of(*sections: str) -> Collection[str]:
    """The flags of these configuration sections, aliases included."""
    named = [name for name, option in OPTIONS.items() if option.section in sections]
    return [flag for name in named for flag in (f"--{name}", *ALIASES.get(name, ()))]


def environment_without(*sections: str) -> dict[str, str]:
    """This process's environment without the variables of these configuration sections."""
    dropped = {option.variable for option in OPTIONS.values() if option.section in sections}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def environment_value(name: str) -> str | None:
    """An option's value in the environment; None if it is absent or empty."""
    return os.environ.get(OPTIONS[name].variable) or None


def without_drafting(flags: Sequence[str]) -> list[str]:
    """The server's flags and values, without the options of drafting and acceptance."""
    drafting_flags, kept, dropping = frozenset(flags_of("speculative")), list[str](), False
    for text in flags:
        if text.startswith("--"):
            dropping = text.partition("=")[0] in drafting_flags
        if not dropping:
            kept.append(text)
    return kept


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: should be a number, 1 or more")
    return int(text)


def temperature(text: str) -> float:
    """Parse a number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: should be a number, 0 or more")
    return number
