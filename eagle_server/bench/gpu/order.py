"""What `gpu` asks of a child process. Imports nothing heavy: the parent must work where a child cannot."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

# Every part, in order of importance, with the seconds without which it is not begun at full size.
PARTS = {"floor": 20.0, "decode": 45.0, "profile": 10.0, "batches": 30.0, "peer": 25.0, "contexts": 50.0, "mla": 15.0}


@dataclass(frozen=True)
class Order:
    """`file` is where results go; `deadline` is of time.time()."""

    parts: list[str]
    file: str
    device: str
    tiny: bool
    deadline: float

    def command(self) -> list[str]:
        """How to start a child with this order."""
        return [sys.executable, "-m", "eagle_server.bench.gpu.child", json.dumps(asdict(self))]
