"""The server with its defaults, over HTTP: what users get, with the engine's process and its clients."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from eagle_tools.bench.gpu.engines import BenchEngines
from eagle_tools.bench.gpu.packages import installed
from eagle_tools.bench.padding import pad_checkpoint
from eagle_tools.bench.servers import running

NEEDED = ("fastapi", "uvicorn", "pydantic", "zmq", "transformers")  # by the server, beyond what the other parts need


def served(engines: BenchEngines) -> dict[str, Any]:
    """Tokens/s of a server with its defaults, and of one that does not draft, for each number of clients.

    Raises:
        ModuleNotFoundError: a package that the server needs is not installed.
    """
    for package in NEEDED:
        if not installed(package):
            raise ModuleNotFoundError(f"the server needs {package}")
    from eagle_tools.bench.load import Workload, measure

    scale, rates = engines.scale, dict[str, list[dict[str, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        pad_checkpoint(Path(folder), scale.shape, device=engines.device, dtype=engines.dtype)
        engines.release()
        for name, flags in server_flags(folder, engines.device.type).items():
            rates[name] = []
            with running(name, flags) as server:
                for clients in scale.clients:
                    workload = Workload(tuple(engines.batch_of(2 * clients)), scale.served_tokens, 0.0)
                    for _ in range(2):  # the first time trees and costs settle
                        server.flush_cache()
                        measurement = measure(server, workload, clients)
                    rates[name].append({"clients": clients, "tokens_per_second": measurement.tokens_per_second})
    return rates


def server_flags(folder: str, device: str) -> dict[str, list[str]]:
    """The flags of both servers. All other options have their defaults."""
    target = ["--device", device, "--model-path", f"{folder}/target"]
    return {
        "plain": [*target, "--speculative-algorithm", "NONE"],
        "speculative": [*target, "--speculative-draft-model-path", f"{folder}/eagle3"],
    }
