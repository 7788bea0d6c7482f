"""python -m eagle_server.bench.gpu: everything worth knowing of one GPU machine, by one command, in a few minutes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_server.bench.gpu.child_command import PARTS, ChildCommand
from eagle_server.bench.gpu.report import markdown, plot
from eagle_server.bench.gpu.suite import SUITE, run_suite

TESTS_SHARE = 0.3  # of the budget, at most
RESERVE = 20.0  # seconds kept for the report
GRACE = 5.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_server.bench.gpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Checks and measures eagle_server on a GPU: runs tests/gpu, then measures\n\n"
        "  floor     copy bandwidth, matmul rate, and the least time of a plain step\n"
        "  decode    batch 1: plain step, verification and cycle against their goals\n"
        "  profile   the kernels that take most of a cycle\n"
        "  batches   speculative over plain throughput at batch 1 to 64\n"
        "  peer      transformers' generate over the same weights\n"
        "  contexts  1k to 32k: mask or cascade to verify; mask, cascade or beams to draft\n"
        "  mla       a DeepSeek-V3-shaped attention layer\n\n"
        "with the embedded demo pair padded to the cost of Llama-3.1-8B. Parts run in this order. If one fails or\n"
        "has no time left, the report says so, and the others go on.",
        epilog="On a CPU: python -m eagle_server.bench.gpu --tiny --device cpu --out /tmp/gpu",
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for JSON, table and PNG")
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget, tests included (8)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure (all)")
    parser.add_argument("--no-tests", action="store_true", help="leave tests/gpu out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --tiny (cuda)")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the command out; times mean nothing")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run everything; 0, 1 if a part or test failed, 2 with one line on stderr if the arguments are wrong."""
    began = time.time()
    arguments = _parser().parse_args(argv)
    if arguments.device == "cpu" and not arguments.tiny:
        print("bench.gpu: --device cpu needs --tiny: the full model is for a GPU", file=sys.stderr)
        return 2
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
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
    measured = measure(arguments.parts, out, device=arguments.device, tiny=arguments.tiny, deadline=deadline)
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


def measure(parts: Sequence[str], out: Path, *, device: str, tiny: bool, deadline: float) -> dict[str, Any]:
    """Every part's result, from as many child processes as it takes."""
    file = out / "parts.json"
    file.unlink(missing_ok=True)
    known: dict[str, Any] = {}
    left = list(parts)
    while left:
        command = ChildCommand(left, str(file), device, tiny, deadline)
        ended = _run_child(command, max(GRACE, deadline - time.time() + GRACE))
        known = json.loads(file.read_text()) if file.exists() else {}
        begun = [name for name in left if name in known]
        for name in begun:
            if known[name]["status"] == "running":
                known[name] = {"status": "failed", "reason": ended}
        if not begun:  # not even the first part: the next child would do no better
            known |= {name: {"status": "failed", "reason": ended} for name in left}
        file.write_text(json.dumps(known))
        left = [name for name in left if name not in known]
    return known


def _run_child(command: ChildCommand, limit: float) -> str:
    """How the child ended, in words."""
    process = subprocess.Popen(command.argv())
    try:
        status = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "still running when the time budget was spent"
    return f"the process ended with status {status}; its last words are on stderr"


def _write(out: Path, document: dict[str, Any]) -> None:
    (out / "gpu.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
