"""python -m eagle_tools.bench.gpu: everything worth knowing of one GPU machine, by one command, in a few minutes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_tools import require_extra
from eagle_tools.bench.gpu.child_command import BUILD, PARTS, ChildCommand
from eagle_tools.bench.gpu.report import markdown, plot
from eagle_tools.bench.gpu.suite import SUITE, run_suite

TESTS_SHARE = 0.3  # the most that tests take of the budget
RESERVE = 20.0  # seconds kept for the report
GRACE = 5.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.gpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Checks and measures eagle_server on a GPU: runs tests/gpu, then measures\n\n"
        "  floor     copy bandwidth, matmul rate, and the least time of a plain step\n"
        "  decode    batch 1: plain step and cycle against their goals\n"
        "  stages    batch 1: the kernels of each stage, and a verification against its goal\n"
        "  served    the server with its defaults, over HTTP, with and without drafts, 1 to 64 clients\n"
        "  batches   speculative over plain throughput at batch 1 to 64: adaptive trees, chains, one size\n"
        "  peer      transformers' generate over the same weights\n"
        "  contexts  1k to 32k: the plain step and its floor\n"
        "  paged     1k to 32k: verify and draft by a kernel over the page table\n"
        "  mask      1k to 32k: verify and draft under a mask\n"
        "  cascade   1k to 32k: verify and draft by a cascade\n"
        "  per_node  1k to 32k: verify by a cascade, draft by a query per node\n"
        "  mla       a DeepSeek-V3-shaped attention layer\n"
        "  products  a layer's matrix products in bfloat16, fp8 and int4\n\n"
        "with the embedded demo pair padded to the cost of Llama-3.1-8B. Parts run in this order, each in its own\n"
        "process. If one fails or has no time left, the report says so, and the others go on.",
        epilog="On a CPU: python -m eagle_tools.bench.gpu --tiny --device cpu --out /tmp/gpu",
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for JSON, table and PNG")
    parser.add_argument("--build", action="store_true", help="first compile FlashInfer's kernels, outside the budget")
    parser.add_argument("--minutes", type=float, default=10.0, help="time budget, tests included (10)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure (all)")
    parser.add_argument("--no-tests", action="store_true", help="leave tests/gpu out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --tiny (cuda)")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the command out; times mean nothing")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run everything; 0, 1 if a part or test failed, 2 with one line on stderr if the arguments are wrong."""
    arguments = _parser().parse_args(argv)
    if arguments.device == "cpu" and not arguments.tiny:
        print("bench.gpu: --device cpu needs --tiny: the full model is for a GPU", file=sys.stderr)
        return 2
    require_extra("bench.gpu", ["matplotlib"])
    import torch  # not needed for --help

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu: no CUDA device here; --tiny --device cpu tries the command out on a CPU", file=sys.stderr)
        return 2
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    parts = Parts(out / "parts.json", arguments.device, tiny=arguments.tiny)
    if arguments.build:
        print("compiling FlashInfer's kernels; this takes minutes if few are prebuilt", file=sys.stderr)
        parts.measure(BUILD, None)
    began = time.time()
    deadline = began + 60 * arguments.minutes - RESERVE
    document: dict[str, Any] = {
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
        "began": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(began)),
    }
    if not arguments.no_tests:
        limit = min(TESTS_SHARE * 60 * arguments.minutes, deadline - time.time())
        print(f"running {SUITE.name} tests, at most {limit:.0f} s", file=sys.stderr)
        document["tests"] = run_suite(out, limit)
    _write(out, document)
    for name in tqdm(arguments.parts, desc="measuring", unit="part", file=sys.stderr):
        parts.measure(name, deadline)
    measured = dict(parts.known)
    document["machine"] = measured.pop("machine", {}).get("result", {})
    document["parts"] = measured
    document["seconds"] = time.time() - began
    _write(out, document)
    table = markdown(document)
    (out / "gpu.md").write_text(table + "\n")
    print(table)
    plot(out / "gpu.png", document)
    print(f"\nwritten: {out / 'gpu.json'}, {out / 'gpu.md'}, {out / 'gpu.png'}")
    failed = [name for name, part in measured.items() if part["status"] == "failed"]
    broken = document.get("tests", {}).get("failed", 0)
    return 1 if failed or broken else 0


class Parts:
    """Measures parts, each in a child process. `known`: the results so far, from the file that the children write."""

    def __init__(self, file: Path, device: str, *, tiny: bool) -> None:
        self._file, self._device, self._tiny = file, device, tiny
        self.known: dict[str, Any] = {}
        file.unlink(missing_ok=True)

    def measure(self, name: str, deadline: float | None) -> None:
        """`deadline`: a value of time.time(); None: there is none."""
        command = ChildCommand(name, str(self._file), self._device, self._tiny, deadline)
        ended = _run_child(command, None if deadline is None else max(GRACE, deadline - time.time() + GRACE))
        self.known = json.loads(self._file.read_text()) if self._file.exists() else {}
        if self.known.get(name, {"status": "running"})["status"] == "running":
            self.known[name] = {"status": "failed", "reason": ended}
            self._file.write_text(json.dumps(self.known))


def _run_child(command: ChildCommand, limit: float | None) -> str:
    """How the child ended, in words. Nothing that it started, such as a server, outlives it."""
    process = subprocess.Popen(command.argv(), start_new_session=True)
    try:
        status = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return "still running when the time budget was spent"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"the process ended with status {status}; its last words are on stderr"


def _write(out: Path, document: dict[str, Any]) -> None:
    (out / "gpu.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
