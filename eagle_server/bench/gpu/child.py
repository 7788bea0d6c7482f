"""python -m eagle_server.bench.gpu.child: measures parts of the GPU benchmark and leaves what it found in a file.

A process of its own, because a kernel that fails spoils its process for good: `gpu` starts another for what is left.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle_server.bench.gpu import parts
from eagle_server.bench.gpu.lab import FULL, TINY, Lab
from eagle_server.bench.gpu.machine import brief, is_fatal, is_missing_module
from eagle_server.bench.gpu.mla import mla
from eagle_server.bench.gpu.order import PARTS, Order
from eagle_server.bench.gpu.peer import peer

SPOILT = 3  # exit status: a part failed in a way that no later part would survive


MEASURES: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "floor": parts.floor,
    "decode": parts.decode,
    "profile": parts.profile,
    "batches": parts.batches,
    "peer": peer,
    "contexts": parts.contexts,
    "mla": mla,
}


class Results:
    """The file that the parent reads: written after every change, so that a crash loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, name: str, status: str, **more: Any) -> None:
        self._known[name] = {"status": status, **more}
        self._path.write_text(json.dumps(self._known, indent=1))


def main(order: Order) -> int:
    """Measure the parts in turn; 0, or SPOILT."""
    results = Results(Path(order.file))
    lab = Lab(TINY if order.tiny else FULL, torch.device(order.device), order.deadline)
    results.put("machine", "ok", result=lab.machine.facts())
    with tqdm(order.parts, desc="measuring", unit="part", file=sys.stderr) as bar:
        for name in bar:
            bar.set_description(name)
            left = order.deadline - time.time()
            if left < (0 if order.tiny else PARTS[name]):
                results.put(name, "skipped", reason=f"the time budget is spent: {left:.0f} s are left")
                continue
            results.put(name, "running")
            began = time.perf_counter()
            try:
                result = MEASURES[name](lab)
            except Exception as error:  # one part's failure is a result too
                traceback.print_exc(file=sys.stderr)
                status = "skipped" if is_missing_module(error) else "failed"
                results.put(name, status, reason=brief(error), seconds=time.perf_counter() - began)
                if is_fatal(error):
                    return SPOILT
            else:
                results.put(name, "ok", result=result, seconds=time.perf_counter() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main(Order(**json.loads(sys.argv[1]))))
