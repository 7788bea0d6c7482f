"""python -m eagle_server.bench.gpu.child: measures parts of the GPU benchmark and writes the results to a file.

It is a process of its own because a failed kernel makes its process unusable. The parent then starts another child for
the remaining parts.
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

from eagle_server.bench.gpu import measurements
from eagle_server.bench.gpu.child_command import PARTS, ChildCommand
from eagle_server.bench.gpu.engines import FULL, TINY, BenchEngines
from eagle_server.bench.gpu.machine import brief, is_fatal, is_missing_module
from eagle_server.bench.gpu.mla import mla
from eagle_server.bench.gpu.transformers_peer import transformers_peer

SPOILT = 3  # exit status: a part failed and left the process unusable


MEASURES: dict[str, Callable[[BenchEngines], dict[str, Any]]] = {
    "floor": measurements.floor,
    "decode": measurements.decode,
    "profile": measurements.profile,
    "batches": measurements.batches,
    "peer": transformers_peer,
    "contexts": measurements.contexts,
    "mla": mla,
}


class Results:
    """The file that the parent reads. It is written after every change, so that a crash loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, name: str, status: str, **more: Any) -> None:
        self._known[name] = {"status": status, **more}
        self._path.write_text(json.dumps(self._known, indent=1))


def main(command: ChildCommand) -> int:
    """Measure the parts one after the other; returns 0 or SPOILT."""
    results = Results(Path(command.file))
    engines = BenchEngines(TINY if command.tiny else FULL, torch.device(command.device), command.deadline)
    results.put("machine", "ok", result=engines.machine.facts())
    with tqdm(command.parts, desc="measuring", unit="part", file=sys.stderr) as bar:
        for name in bar:
            bar.set_description(name)
            left = command.deadline - time.time()
            if left < (0 if command.tiny else PARTS[name]):
                results.put(name, "skipped", reason=f"the time budget is spent: {left:.0f} s are left")
                continue
            results.put(name, "running")
            began = time.perf_counter()
            try:
                result = MEASURES[name](engines)
            except Exception as error:  # a failed part is a result too
                traceback.print_exc(file=sys.stderr)
                status = "skipped" if is_missing_module(error) else "failed"
                results.put(name, status, reason=brief(error), seconds=time.perf_counter() - began)
                if is_fatal(error):
                    return SPOILT
            else:
                results.put(name, "ok", result=result, seconds=time.perf_counter() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main(ChildCommand(**json.loads(sys.argv[1]))))
