"""One name for a quantity, from flag to kernel: see docs/design/vocabulary.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("eagle_server", "eagle_tools") for path in (ROOT / package).rglob("*.py"))

RETIRED = {  # compared without leading underscores, in lower case
    "num_steps": "steps",
    "spec_steps": "steps",
    "ngram_depth": "ngram_steps",
    "depth_of": "steps_of",
    "draft_token_num": "nodes",
    "num_draft_tokens": "nodes",
    "max_nodes": "nodes, or drafts where the root is left out",
    "beam_width": "topk",
    "fan_out": "topk",
    "load_native_target": "load_family_target: native are the C++ kernels",
}
KEPT = {  # names that others have given
    # The flags, and the keys of /v1/server_info.
    "eagle_server/config/speculative.py": {"num_steps", "num_draft_tokens"},
    "eagle_server/config/trees.py": {"num_steps", "num_draft_tokens", "ngram_depth"},
    "eagle_server/engine/assembly/resolve.py": {"num_steps", "num_draft_tokens", "ngram_depth"},
    # `Ready.num_steps`, a key of /v1/server_info.
    "eagle_server/request.py": {"num_steps"},
    "eagle_server/engine/assembly/assemble.py": {"num_steps"},
    "eagle_server/api/telemetry/metric_definitions.py": {"num_steps"},
    # A key of answers.
    "eagle_server/api/generation/response_parts.py": {"num_draft_tokens"},
    # SGLang's objects.
    "eagle_server/attention/spec_info.py": {"spec_steps", "draft_token_num"},
}
TOKENS = re.compile(r"\b(?:Sequence|Iterable|list|tuple)\[int\b|\bTensor\b|\bNDArray\[np\.int")

Offences = Iterator[tuple[int, str]]
Rule = Callable[[ast.Module], Offences]


def identifiers(module: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the name of everything that is named in code, not in strings."""
    for node in ast.walk(module):
        for field in ("id", "arg", "attr", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str) and not isinstance(node, ast.ExceptHandler):
                yield getattr(node, "lineno", 0), name.rpartition(".")[2]


def annotated(module: ast.Module) -> Iterator[tuple[int, str, str]]:
    """The line, the name and the type of each parameter, field and variable with a type."""
    for node in ast.walk(module):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.lineno, node.arg, ast.unparse(node.annotation)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
            name = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
            yield node.lineno, name, ast.unparse(node.annotation)


def functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(module) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def retired(module: ast.Module) -> Offences:
    """A quantity of trees has one name."""
    for line, name in identifiers(module):
        plain = name.lstrip("_").lower()
        if plain in RETIRED:
            yield line, f"{plain} is {RETIRED[plain]}"


def text_is_a_string(module: ast.Module) -> Offences:
    for line, name, kind in annotated(module):
        if name.lstrip("_") == "text" and TOKENS.search(kind):
            yield line, f"{name}: {kind} are tokens; text is a string"


def of_constructs(module: ast.Module) -> Offences:
    for function in functions(module):
        decorators = {ast.unparse(each) for each in function.decorator_list}
        if function.name == "of" and "classmethod" not in decorators:
            yield function.lineno, "`of` constructs; rows_of selects, and a verb does anything else"


def drafted_is_a_count(module: ast.Module) -> Offences:
    for line, name, kind in annotated(module):
        if name.lstrip("_") == "drafted" and re.search(r"\bbool_?\b", kind):
            yield line, f"{name}: {kind} is no count: has_drafted, is_node"
    for function in functions(module):
        if function.name == "drafted":
            yield function.lineno, "drafted is a count, and no function"


def found(rule: Rule, path: Path) -> list[tuple[int, str]]:
    offences = list(rule(ast.parse(path.read_text(encoding="utf-8"), str(path))))
    kept = KEPT.get(str(path.relative_to(ROOT)), set()) if rule is retired else set()
    return [(line, message) for line, message in offences if message.partition(" ")[0] not in kept]


@pytest.mark.parametrize("rule", [retired, text_is_a_string, of_constructs, drafted_is_a_count])
def test_every_quantity_has_its_name(rule: Rule) -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {message}" for path in MODULES for line, message in found(rule, path)
    ]
    assert not offenders, "\n".join(offenders)


def test_every_exception_is_needed() -> None:
    for place, names in KEPT.items():
        module = ast.parse((ROOT / place).read_text(encoding="utf-8"))
        assert {message.partition(" ")[0] for _, message in retired(module)} == names, place


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        (retired, "def forwards(num_steps): ..."),
        (retired, "class Batch:\n    spec_steps: int"),
        (retired, "self._max_nodes = 3"),
        (retired, "replace(batch, num_draft_tokens=3)"),
        (retired, "print(verify.draft_token_num)"),
        (retired, "NGRAM_DEPTH = _FAN_OUT = 8"),
        (retired, "from tools import beam as beam_width"),
        (text_is_a_string, "def mask(self, text: Sequence[int]): ..."),
        (text_is_a_string, "class Chunk:\n    text: Sequence[int] = ()"),
        (text_is_a_string, "def logits(text: Tensor | None): ..."),
        (text_is_a_string, "self._text: list[int] = []"),
        (of_constructs, "class Tree:\n    def of(self, requests): ..."),
        (of_constructs, "class Tree:\n    @property\n    def of(self): ..."),
        (drafted_is_a_count, "def took(*, drafted: bool): ..."),
        (drafted_is_a_count, "class Cycle:\n    drafted: bool = False"),
        (drafted_is_a_count, "class Budget:\n    def drafted(self, parents): ..."),
    ],
)
def test_an_offence_is_found(rule: Rule, planted: str) -> None:
    assert list(rule(ast.parse(planted)))


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (retired, 'answer["num_steps"] = tree.steps  # num_draft_tokens'),
        (text_is_a_string, "def encode(text: str) -> list[int]: ..."),
        (of_constructs, "class Tree:\n    @classmethod\n    def of(cls, parents): ..."),
        (drafted_is_a_count, "class Output:\n    drafted: int = 0"),
    ],
)
def test_the_names_themselves_are_allowed(rule: Rule, allowed: str) -> None:
    assert not list(rule(ast.parse(allowed)))
