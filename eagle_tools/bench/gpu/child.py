"""python -m eagle_tools.bench.gpu.child: measures one part of the GPU benchmark and writes the result to a file.

Every part has a process of its own, because a failed kernel makes its process unusable.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle_tools.bench.gpu.build import build
from eagle_tools.bench.gpu.child_command import BUILD, PARTS, ChildCommand
from eagle_tools.bench.gpu.contexts import long_plain, long_trees
from eagle_tools.bench.gpu.engines import FULL, TINY, BenchEngines
from eagle_tools.bench.gpu.machine import brief, is_missing_module
from eagle_tools.bench.gpu.measurements import batches, decode, floor
from eagle_tools.bench.gpu.mla import mla
from eagle_tools.bench.gpu.products import products
from eagle_tools.bench.gpu.served import served
from eagle_tools.bench.gpu.stages import stages
from eagle_tools.bench.gpu.transformers_peer import transformers_peer

MEASURES: dict[str, Callable[[BenchEngines], dict[str, Any]]] = {
    BUILD: build,
    "floor": floor,
    "decode": decode,
    "stages": stages,
    "served": served,
    "batches": batches,
    "peer": transformers_peer,
    "contexts": long_plain,
    "paged": partial(long_trees, verifying="paged", drafting="paged"),
    "mask": partial(long_trees, verifying="mask", drafting="mask"),
    "cascade": partial(long_trees, verifying="cascade", drafting="cascade"),
    "per_node": partial(long_trees, verifying="cascade", drafting="per_node"),
    "mla": mla,
    "products": products,
}


class Results:
    """The file that the parent reads. It is written after every change, so that a crash loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, name: str, status: str, **more: Any) -> None:
        self._known[name] = {"status": status, **more}
        self._path.write_text(json.dumps(self._known, indent=1))


def main(command: ChildCommand) -> None:
    """Measure the part. A part that fails, or has no time left, is a result too."""
    results, name = Results(Path(command.file)), command.part
    deadline = math.inf if command.deadline is None else command.deadline
    left = deadline - time.time()
    if left < (0 if command.tiny or name == BUILD else PARTS[name]):
        results.put(name, "skipped", reason=f"the time budget is spent: {left:.0f} s are left")
        return
    engines = BenchEngines(TINY if command.tiny else FULL, torch.device(command.device), deadline)
    results.put("machine", "ok", result=engines.machine.facts())
    results.put(name, "running")
    began = time.perf_counter()
    try:
        result = MEASURES[name](engines)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        status = "skipped" if is_missing_module(error) or isinstance(error, ModuleNotFoundError) else "failed"
        results.put(name, status, reason=brief(error), seconds=time.perf_counter() - began)
    else:
        results.put(name, "ok", result=result, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main(ChildCommand(**json.loads(sys.argv[1])))
