"""python -m eagle_tools.bench.hostile: a neighbour's requests beside attacks. They must be neither slow nor changed.

The neighbour asks for seeded completions of fixed prompts. Its times beside an attack are compared with those beside a
baseline. If the attack is refused or only sends bytes, the baseline is an idle server. If the attack is decoded, it is
ordinary requests of the same size, because every decoded request takes its share of the machine. Phases of a few
seconds are interleaved over several rounds, and medians over the rounds are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eagle_tools import DEMO
from eagle_tools.bench.attacks import LOADS, Load
from eagle_tools.bench.load import Workload, ask
from eagle_tools.bench.rich_output import Console, Progress, Table
from eagle_tools.bench.servers import BenchError, Server, running
from eagle_tools.bench.soak import family

PROMPTS: list[str] = json.loads((DEMO / "prompts.json").read_text())
BOUND, GRACE = 2.0, 0.05  # the neighbour may be twice as slow as beside the baseline, and 50 ms more
SOURCE = "127.0.0.2"  # the neighbour's address; the attacks come from 127.0.0.1
PATIENCE = 20.0  # seconds; an answer that takes longer is a stall
SETTLE = 10.0  # seconds after an attack, within which the server must be idle and answer
KEY = "neighbour"
CERTIFICATE = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
)


@dataclass(frozen=True)
class Kind:
    """How a server is started. `files`: the limit of open files."""

    flags: tuple[str, ...] = ()
    files: int | None = None
    key: str = ""
    tls: bool = False
    template: str = ""

    def start(self, label: str, stack: ExitStack, flags: Sequence[str]) -> Server:
        """The server, until the end of the stack."""
        options, trusted = list(self.flags), None
        if self.template:
            file = Path(stack.enter_context(TemporaryDirectory())) / "template.jinja"
            file.write_text(self.template)
            options += ["--chat-template", str(file)]
        if self.tls:
            directory = Path(stack.enter_context(TemporaryDirectory()))
            files = [str(directory / "certificate.pem"), "--ssl-keyfile", str(directory / "key.pem")]
            subprocess.run(
                [*CERTIFICATE.split(), "-out", files[0], "-keyout", files[2]], check=True, capture_output=True
            )
            options += ["--ssl-certfile", *files]
            trusted = ssl.create_default_context(cafile=files[0])
        return stack.enter_context(running(label, [*options, *flags], self.files, self.key, trusted))


SERVERS = {
    "default": Kind(),
    "small pool": Kind(("--max-total-tokens", "4096")),
    "few files": Kind(files=256),
    "tools": Kind(("--tool-call-parser", "hermes"), template="{% if tools %}{% endif %}{{ messages[-1].content }}"),
    "key": Kind(("--api-key", KEY), key=KEY),
    "TLS, few files": Kind(files=256, tls=True),
}


@dataclass
class Phase:
    """The neighbour's answers during one phase. `seconds` per answer, `gaps` between two events of an answer."""

    seconds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)  # what the other clients got


class Neighbour:
    """Asks for the same completions again and again, with `streams` clients. Each text must be the first one again."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self._texts: dict[tuple[str, object], str] = {}
        self._asked = count()

    def ask(self, server: Server, index: int, phase: Phase, load: Load) -> None:
        """One answer, added to the phase."""
        prompt, start = PROMPTS[index % len(PROMPTS)][:60], time.perf_counter()
        workload = Workload((), 24, 0.8, seed=index, fields=load.neighbour(next(self._asked)))
        try:
            answer = ask(replace(server, source=SOURCE), prompt, workload, timeout=PATIENCE)
        except (OSError, ValueError, BenchError) as error:
            phase.faults.append(f"the neighbour got {type(error).__name__}: {error}")
        else:
            phase.gaps.extend(answer.gaps)
            if self._texts.setdefault((prompt, load.neighbour), answer.text) != answer.text:
                phase.faults.append("the neighbour's text changed")
        phase.seconds.append(time.perf_counter() - start)

    def measure(self, server: Server, seconds: float, phase: Phase, load: Load) -> None:
        """Answers for a number of seconds; at least one per client."""
        end = time.monotonic() + seconds

        def client(number: int) -> None:
            index = number
            while index == number or (time.monotonic() < end and not phase.faults):
                self.ask(server, index % (4 * self.streams), phase, load)
                index += self.streams

        threads = [threading.Thread(target=client, args=(number,)) for number in range(self.streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def disturb(name: str, server: Server, seconds: float, seed: int, neighbour: Neighbour) -> Phase:
    """One phase: the neighbour beside a load, which runs in a process of its own; then the server must come to rest."""
    phase = Phase()
    command = [sys.executable, "-m", "eagle_tools.bench.attacks", name, str(server.port), str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise BenchError(f"{name} did not start")
        process.stdin.write("go\n")
        process.stdin.flush()
        neighbour.measure(server, seconds, phase, LOADS[name])
        process.kill()
        phase.others.update(line.strip() for line in process.stdout)
    phase.faults.extend(f"status {got}" for got in phase.others if got.startswith("5"))
    phase.faults.extend(_unrest(server))
    return phase


def _unrest(server: Server) -> list[str]:
    """Wait until nothing runs, all KV is free and nothing computes. Returns what is wrong after SETTLE seconds."""
    deadline, wrong = time.monotonic() + SETTLE, "afterwards it does not answer"
    while time.monotonic() < deadline:
        before = _computed(server)
        time.sleep(0.2)
        try:
            stats = server.stats()
        except (OSError, ValueError, KeyError):  # no answer, or the engine is being restarted
            continue
        used = stats["kv_slots_total"] - stats["kv_slots_free"]
        busy = _computed(server) - before
        if not (stats["running"] or stats["waiting"] or used) and busy < 0.1:  # noqa: PLR2004  half a core
            return []
        wrong = (
            f"afterwards {stats['running']} running, {stats['waiting']} waiting, {used} KV slots, {5 * busy:.1f} cores"
        )
    return [wrong]


def _computed(server: Server) -> float:
    """CPU seconds of all processes of a server, from Linux' /proc."""
    ticks = 0
    for pid in family(server.process.pid):
        with suppress(OSError):  # it has ended
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Effect:
    """What a load did to the neighbour. Seconds; medians over the phases. `alone`: the baseline's p99."""

    name: str
    baseline: str | None
    answers: int
    p50: float
    p99: float
    gap: float
    alone: float | None
    others: dict[str, int]
    faults: list[str]

    @property
    def verdict(self) -> str:
        if self.faults:
            return self.faults[0]
        slow = self.alone is not None and self.p99 > BOUND * self.alone + GRACE
        return f"slower than {BOUND:g} x + {1000 * GRACE:g} ms" if slow else "ok"

    @property
    def ratio(self) -> float | None:
        """The p99 to the baseline's."""
        return None if self.alone is None else self.p99 / self.alone


def effects_of(phases: dict[str, list[Phase]]) -> list[Effect]:
    """A row for each load that has phases."""
    rows = []
    for name, measured in phases.items():
        baseline = LOADS[name].baseline
        rows.append(
            Effect(
                name=name,
                baseline=baseline,
                answers=sum(len(phase.seconds) for phase in measured),
                p50=_median(measured, 0.5),
                p99=_median(measured, 0.99),
                gap=statistics.median(max(phase.gaps, default=0.0) for phase in measured),
                alone=None if baseline is None else _median(phases[baseline], 0.99),
                others=dict(sum((phase.others for phase in measured), Counter[str]())),
                faults=[fault for phase in measured for fault in phase.faults],
            )
        )
    return rows


def _median(phases: Sequence[Phase], share: float) -> float:
    """The median over the phases of a quantile of their answers: one hiccup of the machine does not decide."""
    ordered = [sorted(phase.seconds) for phase in phases]
    return statistics.median(seconds[round(share * (len(seconds) - 1))] for seconds in ordered)


def print_table(rows: Sequence[Effect], console: Console) -> None:
    """All rows; a baseline comes before what is compared with it."""
    table = Table()
    for title in ("beside", "baseline", "p50", "p99", "gap", "ratio", "the others got", "verdict"):
        table.add_column(title, justify="right" if title in {"p50", "p99", "gap", "ratio"} else "left")
    for row in rows:
        got = ", ".join(f"{text} ({number})" for text, number in row.others.items())
        times = (f"{row.p50:.2f}", f"{row.p99:.2f}", f"{row.gap:.2f}", "" if row.ratio is None else f"{row.ratio:.2f}")
        table.add_row(row.name, row.baseline or "", *times, got, row.verdict)
    console.print(table)
    console.print("times of the neighbour in seconds: per answer, and the longest gap between two events")


def run(arguments: argparse.Namespace, console: Console) -> list[Effect]:
    """Start the servers that the chosen loads need, and run all phases."""
    attacks: dict[str, list[str]] = {}  # by baseline, so that an attack runs soon after what it is compared with
    for name, load in LOADS.items():
        if load.baseline is not None and name in (arguments.only or LOADS):
            attacks.setdefault(load.baseline, []).append(name)
    order = [name for baseline, others in attacks.items() for name in (baseline, *others)]
    phases: dict[str, list[Phase]] = {name: [] for name in order}
    with ExitStack() as stack, Progress(console=console) as progress:
        task = progress.add_task("starting", total=arguments.rounds * len(order))
        servers: dict[str, Server] = {}
        neighbour = Neighbour(arguments.streams)
        for turn in range(arguments.rounds):
            for name in order:
                progress.update(task, description=name)
                kind = LOADS[name].server
                if kind not in servers:
                    servers[kind] = SERVERS[kind].start(kind, stack, arguments.server_flags)
                    neighbour.measure(servers[kind], arguments.seconds, Phase(), LOADS[name])  # warms up
                if not any(phase.faults for phase in phases[name]):  # a fault is no noise: once is enough
                    phases[name].append(disturb(name, servers[kind], arguments.seconds, turn, neighbour))
                    if phases[name][-1].faults:
                        servers.pop(kind).process.kill()  # the next load gets a new one
                progress.advance(task)
    return effects_of(phases)


def main(argv: Sequence[str]) -> int:
    """Run it; returns 0, 1 if an attack had an effect that it must not have, or 2 with one line on stderr."""
    names = [name for name in LOADS if LOADS[name].baseline]
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.hostile",
        description=__doc__,
        epilog="attacks: " + "; ".join(f"'{name}'" for name in names),
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="ATTACK", help="these attacks (all)")
    parser.add_argument("--rounds", type=int, default=3, help="phases of each load (3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a phase (2)")
    parser.add_argument("--streams", type=int, default=2, help="clients of the neighbour (2)")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON")
    parser.add_argument("server_flags", nargs="*", help="after --: flags of the servers")
    arguments = parser.parse_args(argv)
    console = Console(width=140)
    try:
        rows = run(arguments, console)
    except (BenchError, OSError, subprocess.CalledProcessError) as error:
        print(f"hostile: {error}", file=sys.stderr)
        return 2
    print_table(rows, console)
    values: list[dict[str, Any]] = [{**asdict(row), "ratio": row.ratio, "verdict": row.verdict} for row in rows]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "hostile.json").write_text(json.dumps(values, indent=1))
    console.print(f"written: {arguments.out / 'hostile.json'}")
    return int(any(row.verdict != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
