"""python -m eagle_tools.bench.peers: this server beside OpenVINO GenAI and vLLM, on one target and one EAGLE-3 head.

Nothing is installed: `--vllm` and `--openvino` name the Pythons of environments that have them. The other engines are
called as libraries, this one over HTTP with its own settings: it cuts a chain where drafts do not pay. All engines of
one chain length are loaded at once and take turns. Answers are greedy; each engine's answers with speculation are
compared with its own plain ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from eagle_server.machine import usable_cores
from eagle_server.text.tokenizer import load_tokenizer
from eagle_tools import DEMO
from eagle_tools.bench.figures import save, subplots
from eagle_tools.bench.peer_engines import OURS, Loaded, Prompts, Spec, Texts, loaded, specs
from eagle_tools.bench.report import write_json
from eagle_tools.bench.rich_output import Console, Progress, Table
from eagle_tools.bench.servers import BenchError

LENGTH = 64  # tokens of a prompt
_EXPORTS = """\
--openvino-models DIR has what optimum-cli (optimum-intel[openvino], with einops and diffusers) makes:
  optimum-cli export openvino --task text-generation-with-past -m TARGET --weight-format fp16 DIR/bf16
    and int8 to DIR/int8, and int4 --sym --group-size 128 --ratio 1.0 to DIR/int4
  the same with -m HEAD --trust-remote-code --weight-format fp16 to DIR/draft
    and int8 to DIR/draft-int8, for the targets in int8 and int4
A format that is not there is left out; without DIR/draft OpenVINO decodes plainly only.

example: python -m eagle_tools.bench.peers --target MODEL --draft HEAD --vllm ~/vllm/bin/python
"""


@dataclass
class PeerSpeeds:
    """tokens/s of every round, and the answers."""

    speeds: list[float] = field(default_factory=list)
    texts: list[Texts] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def measure(
    engines: Mapping[Spec, Loaded], prompts: Prompts, clients: int, arguments: argparse.Namespace, progress: Progress
) -> dict[Spec, PeerSpeeds]:
    """Every engine in turn, every second round in reversed order.

    With one client the first token is not timed, so the prompt does not count. With several clients everything is.
    """
    timings = {spec: PeerSpeeds() for spec in engines}
    task = progress.add_task(f"{clients} together", total=(arguments.rounds + 1) * len(engines))
    for number in range(arguments.rounds + 1):  # the first one warms up
        chosen = [prompts[(number * clients + i) % len(prompts)] for i in range(clients)]
        for spec in list(engines)[:: 1 if number % 2 else -1]:
            first = 0.0
            if clients == 1:
                began = time.perf_counter()
                engines[spec].generate(chosen, 1)
                first = time.perf_counter() - began
            began = time.perf_counter()
            texts = engines[spec].generate(chosen, arguments.tokens + (clients == 1))
            seconds = time.perf_counter() - began - first
            progress.advance(task)
            if number:
                timings[spec].speeds.append(clients * arguments.tokens / seconds)
                timings[spec].texts.append(texts)
    return timings


def best(timings: Mapping[Spec, PeerSpeeds], specs: Iterable[Spec], *, ours: bool) -> Spec | None:
    """The fastest of ours, or of the others."""
    fit = [spec for spec in specs if (spec.engine == OURS) == ours]
    return max(fit, key=lambda spec: timings[spec].speed, default=None)


def print_table(timings: Mapping[Spec, PeerSpeeds], title: str, console: Console) -> None:
    """Speeds, their ratios to the fastest other engine of the same format, and best against best."""
    table = Table(title=f"{title}: tokens/s (x the best other engine in the same format)")
    lengths = list(dict.fromkeys(spec.steps for spec in timings))
    for column in ("engine", *("plain" if steps == 0 else f"chain of {steps}" for steps in lengths), "own plain texts"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, format_ in dict.fromkeys((spec.engine, spec.format) for spec in timings):
        cells, same, total = [], 0, 0
        plain = timings.get(Spec(name, format_, 0))
        for steps in lengths:
            spec = Spec(name, format_, steps)
            if spec not in timings:
                cells.append("")
                continue
            peer = best(timings, (s for s in timings if (s.format, s.steps) == (format_, steps)), ours=False)
            ratio = f" ({timings[spec].speed / timings[peer].speed:.2f} x)" if name == OURS and peer else ""
            cells.append(f"{timings[spec].speed:.1f}{ratio}")
            if plain is not None and steps:
                pairs = [
                    (a, b)
                    for x, y in zip(plain.texts, timings[spec].texts, strict=True)
                    for a, b in zip(x, y, strict=True)
                ]
                same, total = same + sum(a == b for a, b in pairs), total + len(pairs)
        table.add_row(f"{name} {format_}", *cells, f"{same} of {total}" if total else "")
    console.print(table)
    ours, peer = best(timings, timings, ours=True), best(timings, timings, ours=False)
    if ours and peer:
        times = timings[ours].speed / timings[peer].speed
        console.print(f"best against best: {ours}, {ours.steps} steps, over {peer}, {peer.steps} steps: {times:.2f} x")


def plot(path: Path, panels: Mapping[str, Mapping[Spec, PeerSpeeds]]) -> None:
    """A panel per number of clients: the best speed of each engine and format, plain in front of it."""
    figure, axes = subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), squeeze=False)
    for axis, (title, timings) in zip(axes[0], panels.items(), strict=True):
        rows = list(dict.fromkeys((spec.engine, spec.format) for spec in timings))[::-1]
        for place, (name, format_) in enumerate(rows):
            mine = {
                spec.steps: timing.speed
                for spec, timing in timings.items()
                if (spec.engine, spec.format) == (name, format_)
            }
            color = "#0b7f5c" if name == OURS else "#8a8f98"
            bar = axis.barh(place, max(mine.values()), 0.7, color=color, alpha=0.45)
            axis.barh(place, mine.get(0, 0.0), 0.7, color=color)
            axis.bar_label(bar, [f" {max(mine.values()):.0f}"], fontsize=8)
        axis.set_yticks(range(len(rows)), [f"{name} {format_}" for name, format_ in rows], fontsize=8)
        axis.set_xlabel("tokens/s: plain (dark), with speculation (light)", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.12)
    save(figure, path)


def read_prompts(path: Path, target: str) -> Prompts:
    """Read a JSON list of strings or of token ids. All prompts get LENGTH tokens, which OpenVINO's batches need."""
    texts = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(target)
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in texts]
    long = [prompt[:LENGTH] for prompt in ids if len(prompt) >= LENGTH]
    if not long:
        joined = [token for prompt in ids for token in prompt] * (LENGTH // max(1, sum(map(len, ids))) + 1)
        long = [joined[start : start + LENGTH] for start in range(0, len(joined) - LENGTH + 1, LENGTH)]
    return long


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.peers",
        description=__doc__,
        epilog=_EXPORTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="checkpoint directory")
    parser.add_argument("--draft", required=True, help="directory of an EAGLE-3 head for it")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM (CPU)")
    parser.add_argument(
        "--vllm-preload", nargs="+", metavar="FILE", help="libiomp5.so and libtcmalloc, as vLLM advises"
    )
    parser.add_argument("--openvino", metavar="PYTHON", help="Python of an environment with openvino-genai")
    parser.add_argument("--openvino-models", type=Path, metavar="DIR", help="the exported models, see below")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 3, 5], help="chain lengths; 0: plain (0 3 5)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="requests at a time (1 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per engine (3)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per answer (64)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="compute threads (all cores)")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=DEMO / "prompts.json",
        help="JSON list of strings or of token ids (the demo's)",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON, PNG and logs")
    parser.add_argument("server_flags", nargs="*", help="after --: more flags for this server")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, print and draw; returns 0, or 2 with one line on stderr."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if bool(arguments.openvino) != bool(arguments.openvino_models):
        parser.error("--openvino and --openvino-models go together")
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=110)
    panels: dict[str, dict[Spec, PeerSpeeds]] = {
        f"{clients} request{'s at once' * (clients > 1)}": {} for clients in arguments.clients
    }
    try:
        prompts = read_prompts(arguments.prompts, arguments.target)
        everything = specs(arguments)
        for steps in arguments.steps:
            with ExitStack() as stack, Progress(console=console, transient=True) as progress:
                engines = {}
                for spec in (spec for spec in everything if spec.steps == steps):
                    progress.console.print(f"loading {spec}, {steps} steps")
                    engines[spec] = stack.enter_context(loaded(spec, arguments))
                for title, clients in zip(panels, arguments.clients, strict=True):
                    panels[title] |= measure(engines, prompts, clients, arguments, progress)
    except (BenchError, OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for title, timings in panels.items():
        print_table(timings, title, console)
    results = {
        title: [vars(spec) | {"tokens_per_second": timing.speeds} for spec, timing in timings.items()]
        for title, timings in panels.items()
    }
    write_json(arguments.out / "peers.json", vars(arguments), results)
    plot(arguments.out / "peers.png", panels)
    console.print(f"written: {arguments.out / 'peers.json'}, {arguments.out / 'peers.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
