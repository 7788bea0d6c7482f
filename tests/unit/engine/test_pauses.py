"""What the engine's loop does while no request runs."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_server.engine import process
from tests.api.fake_engine import FakeEngine


class Capturing(FakeEngine):
    """Lacks some graphs."""

    def __init__(self, missing: int) -> None:
        super().__init__()
        self.missing, self.preloaded = missing, 0

    @property
    def lacks_graphs(self) -> bool:  # type: ignore[override]
        return self.missing > 0

    def capture_graph(self) -> None:
        self.missing -= 1

    def preload(self) -> None:
        self.preloaded += 1


class Inbox:
    """A message arrives after so many waits."""

    def __init__(self, waits: int) -> None:
        self.left = waits

    def stays_empty(self, seconds: float) -> bool:
        self.left -= 1
        return self.left >= 0


@pytest.mark.parametrize(
    ("waits", "missing", "preloaded"), [(0, 2, 0), (1, 1, 0), (2, 0, 0), (3, 0, 1), (9, 0, 1)], ids=str
)
def test_graphs_are_captured_one_by_one_until_a_message_arrives(waits: int, missing: int, preloaded: int) -> None:
    engine, inbox = Capturing(2), Inbox(waits)
    given: Any = (engine, inbox)
    is_preloaded = process._prepare(*given, is_preloaded=False)
    assert (engine.missing, engine.preloaded, is_preloaded) == (missing, preloaded, bool(preloaded))
    process._prepare(*given, is_preloaded=True)
    assert engine.preloaded == preloaded
