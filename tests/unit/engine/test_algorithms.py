"""The table of drafting algorithms names only what exists."""

from __future__ import annotations

import inspect
from pathlib import Path
from pkgutil import resolve_name

import pytest

from eagle_server.algorithms import ALGORITHMS, ALIASES, NAMES, STATIC_TREE_OPTIONS, Algorithm
from eagle_server.config import SpeculativeSection, sources
from eagle_server.config.sections import DEMO_TARGET
from eagle_server.models.checkpoints.drafts.draft_loading import DraftFormat, format_of
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.drafters.interface import DrafterSetup

ROWS = pytest.mark.parametrize("row", ALGORITHMS.values(), ids=ALGORITHMS)


def concrete(cls: type) -> set[type]:
    below = set[type]().union(*(concrete(each) for each in cls.__subclasses__()))
    return below | (set() if inspect.isabstract(cls) else {cls})


def flags_of(field: str) -> list[str]:
    name = f"speculative-{field.replace('_', '-')}"
    return [f"--{name}", *sources.ALIASES.get(name, [])]


@ROWS
def test_the_modules_of_a_row_have_the_documented_functions(row: Algorithm) -> None:
    for name in ("recognizes", "load"):
        expected = list(inspect.signature(getattr(DraftFormat, name)).parameters)[1:]
        assert list(inspect.signature(getattr(format_of(row), name)).parameters) == expected
    for drafter in filter(None, (row.drafter, row.static_drafter)):
        first, setup = inspect.signature(resolve_name(drafter)).parameters.values()
        assert setup.annotation == DrafterSetup.__name__, first
    [tree] = inspect.signature(resolve_name(row.lookahead)).parameters.values()
    assert tree.annotation == TreeConfig.__name__


@ROWS
def test_a_row_is_that_of_one_model_class(row: Algorithm) -> None:
    format_of(row)  # imports it
    served = [cls for cls in concrete(DraftModel) if cls.__module__.startswith("eagle_server.")]
    assert [cls.__name__ for cls in served if getattr(cls, "algorithm", None) == row.name] == [
        inspect.signature(format_of(row).load).return_annotation
    ]


@ROWS
def test_options_and_files_of_a_row_exist(row: Algorithm) -> None:
    trees = [row.static_tree] if row.static_tree is not None else []
    options = {*row.refuses, *(name for tree in trees for name in (tree.field, *tree.excludes(ngrams=False)))}
    assert options <= set(SpeculativeSection.model_fields)
    assert all(tree in STATIC_TREE_OPTIONS and tree.flag in flags_of(tree.field) for tree in trees)
    assert (Path(DEMO_TARGET).parent / row.demo).is_dir()
    assert row.own_tree is None or row.static_drafter is None


@ROWS
def test_a_row_names_why_its_drafts_may_be_rejected(row: Algorithm) -> None:
    assert ("--speculative-draft-config-override" not in row.silent_causes) or not row.refuses
    assert "chat template" in row.silent_causes


def test_names_are_those_of_the_table() -> None:
    assert set(ALIASES.values()) <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES) == 2 * len(ALGORITHMS) + 2
