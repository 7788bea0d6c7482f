"""Full products of parameters, of which the gate runs a covering part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def deep_unless(quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if quick else (pytest.mark.deep,)


def covering(*axes: Iterable[Any], together: int) -> list[Any]:
    """Every combination of one value per axis, for `parametrize`. Values that are tuples stand for several arguments.

    All but a covering part are marked deep. With `together` 1 the part has every value of every axis; with 2 it has
    every pair of values of every two axes, for axes that interact.
    """
    values = [list(axis) for axis in axes]
    combinations = list(itertools.product(*(range(len(axis)) for axis in values)))
    subsets = list(itertools.combinations(range(len(values)), together))
    covers = {each: {(axes, *(each[a] for a in axes)) for axes in subsets} for each in combinations}
    missing, quick = set().union(*covers.values()), set()
    while missing:
        best = max(combinations, key=lambda each: len(covers[each] & missing))
        quick.add(best)
        missing -= covers[best]

    def parameter(combination: tuple[int, ...]) -> Any:
        chosen = [axis[place] for axis, place in zip(values, combination, strict=True)]
        spread = [part for value in chosen for part in (value if isinstance(value, tuple) else (value,))]
        return pytest.param(*spread, marks=deep_unless(combination in quick))

    return [parameter(combination) for combination in combinations]
