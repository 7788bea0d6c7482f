"""The command line of a child that measures. Imports nothing heavy: the parent must work where a child fails."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

# Every part in order of importance, and the seconds that must be left to begin it at full size: a process, the weights,
# the graphs, the measurement.
PARTS = {
    "floor": 30.0,
    "decode": 45.0,
    "stages": 40.0,
    "served": 200.0,
    "batches": 180.0,
    "peer": 40.0,
    "contexts": 40.0,
    "paged": 40.0,
    "mask": 40.0,
    "cascade": 40.0,
    "per_node": 40.0,
    "mla": 25.0,
    "products": 30.0,
}
BUILD = "build"  # compiles what the tests and the parts need, outside the time budget


@dataclass(frozen=True)
class ChildCommand:
    """What a child measures. `file` receives the results; `deadline` is a value of time.time(), None: there is none."""

    part: str
    file: str
    device: str
    tiny: bool
    deadline: float | None

    def argv(self) -> list[str]:
        """The arguments that start the child."""
        return [sys.executable, "-m", "eagle_tools.bench.gpu.child", json.dumps(asdict(self))]
