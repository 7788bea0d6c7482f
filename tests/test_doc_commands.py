"""Commands in the documents: each is known, and has only flags that its program has.

tests/e2e/test_doc_commands.py runs those that a test can run.
"""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest
import yaml

from eagle_server import __main__ as serving
from eagle_server.config import commands, parse_args
from eagle_server.config.sources import ALIASES, OPTIONS
from tests.support.doc_commands import ALL_BLOCKS, PAGES, PYTHON, ROOT, SHELL, WHAT_IS_NEEDED, Block

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Flags of other programs that the documents mention in their text.
FOREIGN = {
    *("--build-arg", "--profile"),  # docker
    *("--model_args", "--gen_kwargs", "--apply_chat_template", "--model"),  # lm_eval
    *("--url", "--tokenizer"),  # aiperf
    *("--index-url", "--torch-backend", "--no-deps", "--target"),  # pip, uv
    *("--balance-abs-threshold", "--cache-threshold", "--policy"),  # the routers, held by tests/e2e/test_routers.py
    *("--mode", "--check", "--dist", "--strict"),  # flashinfer, ruff, pytest, mkdocs
    "--renew",  # .ci/run
}
shell_blocks = pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language == SHELL], ids=str)


class Parsed(BaseException):
    """The arguments are right; what they would start is not started. No program catches it."""


@pytest.fixture(autouse=True)
def _only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    original, split = argparse.ArgumentParser.parse_args, commands.CommandParser.split

    def parse(self: argparse.ArgumentParser, *arguments: Any, **keywords: Any) -> NoReturn:
        original(self, *arguments, **keywords)
        raise Parsed

    def parse_both(self: commands.CommandParser, *arguments: Any) -> NoReturn:
        _, flags = split(self, *arguments)
        parse_args(flags, {})
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(commands.CommandParser, "split", parse_both)


def accepts(run: Callable[[], object]) -> None:
    """The program gets as far as its arguments' end, or shows its help."""
    with pytest.raises((Parsed, SystemExit)) as stopped:
        run()
    assert stopped.type is Parsed or stopped.value.code in (0, None)


def module_accepts(name: str, arguments: Sequence[str]) -> None:
    if name == "eagle_server" and (not arguments or arguments[0] not in serving.COMMANDS):
        arguments = [*arguments, "--dry-run"]
    if find_spec(name).submodule_search_locations is not None:
        name += ".__main__"
    accepts(lambda: importlib.import_module(name).main(arguments))


def python(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m" and arguments[1].startswith(("eagle_server", "eagle_tools")):
        module_accepts(arguments[1], arguments[2:])
    elif arguments[0] == "-m":
        assert arguments[1] in ("venv", "build", "sglang_router.launch_router")
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", list(arguments))
            accepts(lambda: runpy.run_path(str(ROOT / arguments[0]), run_name="__main__"))


def torchrun(arguments: Sequence[str]) -> None:
    """Its own options end where the module begins."""
    python(arguments[list(arguments).index("-m") :])


def pip(arguments: Sequence[str]) -> None:
    assert arguments[0] in ("install", "wheel")
    options = argparse.ArgumentParser(exit_on_error=False)
    options.add_argument("-e", "--editable")
    options.add_argument("--index-url")
    options.add_argument("--extra-index-url")
    options.add_argument("packages", nargs="*")
    if arguments[0] == "wheel":
        options.add_argument("--no-deps", action="store_true")
        options.add_argument("--wheel-dir")
    given, unknown = options.parse_known_args(arguments[1:])
    assert not unknown
    for package in [*given.packages, *([given.editable] if given.editable else [])]:
        if extras := re.fullmatch(r"(?:\.|eagle-server)\[(.+)\]", package):
            assert set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()
        if version := re.search(r"eagle_server-([\d.]+\d)-", package):
            assert version[1] == PROJECT["version"]
        if "==" in package:
            assert package in PROJECT["dependencies"]


@cache
def flags_of_pytest() -> set[str]:
    command = [sys.executable, "-m", "pytest", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown))


def run_pytest(arguments: Sequence[str]) -> None:
    assert {word.partition("=")[0] for word in arguments if word.startswith("-")} <= flags_of_pytest()
    assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/"))


def docker(arguments: Sequence[str]) -> None:
    files = [arguments[at + 1] for at, word in enumerate(arguments) if word == "-f"]
    assert all((ROOT / name).is_file() for name in files)
    if arguments[0] == "compose":
        services = yaml.safe_load((ROOT / files[0]).read_text(encoding="utf-8"))["services"].values()
        profiles = {name for service in services for name in service["profiles"]}
        assert {arguments[at + 1] for at, word in enumerate(arguments) if word == "--profile"} <= profiles
    elif arguments[0] == "run" and "--entrypoint" not in arguments:
        (image,) = [at for at, word in enumerate(arguments) if word.partition(":")[0] == "eagle-server"]
        flags = ["owner/model" if word.startswith("/") else word for word in arguments[image + 1 :]]  # not here
        accepts(lambda: parse_args([*flags, "--dry-run"], {}))
    else:
        assert arguments[0] in ("build", "run")


def known(arguments: Sequence[str]) -> None:
    """Nothing to check: a test runs it as it is, or it has no arguments of ours."""


CHECKS = {
    "python": python,
    "python3": python,
    "eagle-server": lambda arguments: module_accepts("eagle_server", arguments),
    "torchrun": torchrun,
    "pip": pip,
    "pytest": run_pytest,
    "docker": docker,
    "curl": known,
    "git": known,
    "cd": known,
    "lm_eval": known,  # tests/e2e/test_lm_eval.py
    ".": known,
}


def test_blocks_say_their_language_and_their_needs_by_known_words() -> None:
    assert not [str(block) for block in ALL_BLOCKS if not block.language], "a fence names its language"
    assert not [str(block) for block in ALL_BLOCKS if block.needs not in (None, *WHAT_IS_NEEDED)]
    assert {SHELL, PYTHON} <= {block.language for block in ALL_BLOCKS}
    misplaced = re.compile(r"^<!-- needs: \w+ -->\n(?!\n(?:```|    ))", re.MULTILINE)
    lost = [page.name for page in PAGES if misplaced.search(page.read_text(encoding="utf-8"))]
    assert not lost, "a marker stands before a block, with an empty line between"


@shell_blocks
def test_every_command_is_known_and_its_arguments_are_right(block: Block) -> None:
    for program, *arguments in block.commands:
        check = CHECKS.get(program)
        assert check is not None or block.needs is not None, f"{program}: add it to CHECKS, or mark the block"
        if check is not None:
            check(arguments)


@pytest.mark.parametrize(
    "arguments", [["--port", "80", "--no-such-flag"], ["--topk", "many"], ["tree", "--cycle", "3"]]
)
def test_a_wrong_command_is_found(arguments: list[str]) -> None:
    with pytest.raises(AssertionError):
        python(["-m", "eagle_server", *arguments])


def help_with_commands(self: argparse.ArgumentParser, file: Any = None) -> None:
    """Its help, then that of each of its commands."""
    print(self.format_help())
    for action in self._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                print(command.format_help())


def flags_of_the_project(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every flag in the help of every program of the package and of the repository."""
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", help_with_commands)
    helps = [["-m", "eagle_server", "--help"], ["docker/check.py", "--help"]]
    for path in sorted(path for folder in ("eagle_server", "eagle_tools") for path in (ROOT / folder).rglob("*.py")):
        if re.search(r"^def main\(arg\w*: ", path.read_text(encoding="utf-8"), re.MULTILINE):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            helps.append(["-m", module, "--help"])
    for words in helps:
        python(words)
    flags = {*(f"--{name}" for name in OPTIONS), *(alias for aliases in ALIASES.values() for alias in aliases)}
    return flags | set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))


def test_no_page_names_a_flag_that_does_not_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    existing = flags_of_the_project(capsys, monkeypatch) | FOREIGN
    for page in PAGES:
        spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text(encoding="utf-8"))
        named = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
        assert not named - existing, page
