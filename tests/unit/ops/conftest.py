"""Each test computes by the variants that it is parametrized with, see `tests.support.kernels.each_variant`."""

from __future__ import annotations

import pytest

from eagle_server.ops.layers import fused
from tests.support.fused_kernels import fake_flashinfer
from tests.support.kernels import take


@pytest.fixture(autouse=True)
def _computes_by_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "variant" in parameters:
        take(parameters["variant"], monkeypatch)
        monkeypatch.setattr(fused, "_flashinfer", fake_flashinfer)
