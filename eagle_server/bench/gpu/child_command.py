"""The command line of a child that measures. Imports nothing heavy: the parent must work where a child fails."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

# Every part in order of importance, and the seconds that must be left to begin it at full size.
PARTS = {"floor": 20.0, "decode": 45.0, "profile": 10.0, "batches": 30.0, "peer": 25.0, "contexts": 50.0, "mla": 15.0}


@dataclass(frozen=True)
class ChildCommand:
    """What a child measures. `file` receives the results; `deadline` is a value of time.time()."""

    parts: list[str]
    file: str
    device: str
    tiny: bool
    deadline: float

    def argv(self) -> list[str]:
        """The arguments that start the child."""
        return [sys.executable, "-m", "eagle_server.bench.gpu.child", json.dumps(asdict(self))]
