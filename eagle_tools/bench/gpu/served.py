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


def served(engines: BenchEngines) -> dict[str, list[dict[str, Any]]]:
    """Tokens/s of a server with its defaults, and of one that does not draft, for each number of clients.

    The last row is of prompts of mixed lengths: chunks of long ones are computed beside the others' decoding.

    Raises:
        ModuleNotFoundError: a package that the server needs is not installed.
    """
    for package in NEEDED:
        if not installed(package):
            raise ModuleNotFoundError(f"the server needs {package}")
    from eagle_tools.bench.load import Workload, measure

    scale, rates = engines.scale, dict[str, list[dict[str, Any]]]()
    with tempfile.TemporaryDirectory() as folder:
        pad_checkpoint(Path(folder), scale.shape, device=engines.device, dtype=engines.dtype)
        engines.release()
        for name, flags in server_flags(folder, engines.device.type).items():
            rates[name] = []
            with running(name, flags) as server:
                for clients, mixed in (*((clients, False) for clients in scale.clients), (scale.clients[-1], True)):
                    prompts = mixed_prompts(engines, 2 * clients) if mixed else engines.batch_of(2 * clients)
                    workload = Workload(tuple(prompts), scale.served_tokens, 0.0)
                    for _ in range(2):  # the first time trees and costs settle
                        server.flush_cache()
                        measurement = measure(server, workload, clients)
                    rate = measurement.tokens_per_second
                    rates[name].append({"clients": clients, "mixed": mixed, "tokens_per_second": rate})
    return rates


def mixed_prompts(engines: BenchEngines, count: int) -> list[list[int]]:
    """`count` prompts of the lengths in `Scale.mixed`, in turn. They begin at different places of one text."""
    lengths = engines.scale.mixed
    text = engines.text_of(max(lengths) + count)
    return [text[number : number + lengths[number % len(lengths)]] for number in range(count)]


def server_flags(folder: str, device: str) -> dict[str, list[str]]:
    """The flags of both servers. All other options have their defaults."""
    target = ["--device", device, "--model-path", f"{folder}/target"]
    return {
        "plain": [*target, "--speculative-algorithm", "NONE"],
        "speculative": [*target, "--speculative-draft-model-path", f"{folder}/eagle3"],
    }
