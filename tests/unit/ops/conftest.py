"""Each test computes by the variants that it is parametrized with, see `tests.support.kernels.each_variant`."""

from __future__ import annotations

import pytest

from tests.support.kernels import take


@pytest.fixture(autouse=True)
def _computes_by_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "variant" in parameters:
        take(parameters["variant"], monkeypatch)
