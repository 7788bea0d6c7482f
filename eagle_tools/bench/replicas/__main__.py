"""python -m eagle_tools.bench.replicas: how many replicas, and which routing? A simulation from measured costs.

Conversations arrive at random: they share their beginnings (system prompts), have several turns, and users think in
between. Every policy routes the same conversations over N replicas. A replica has the prefix cache (least recently used
leaves go first), the batching and the cycle times that were measured on a real server, speculation included: the
larger the batch, the longer the cycle, and the fewer tokens drafting adds to it.

--measure measures a server of yours first. --replay checks the model: a minute of real conversations with the server,
then the same turns in the simulation, side by side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from eagle_tools import DEMO
from eagle_tools.bench.load import read_texts
from eagle_tools.bench.replicas.conversations import BURSTY, POISSON, Dialogue, Habits, converse
from eagle_tools.bench.replicas.costs import DEMO_COSTS, ReplicaCosts, read_costs
from eagle_tools.bench.replicas.measure import measure_costs, steps
from eagle_tools.bench.replicas.replay import replay
from eagle_tools.bench.replicas.report import Point, plot_points, print_costs, print_points, print_replay
from eagle_tools.bench.replicas.routing import POLICIES
from eagle_tools.bench.replicas.simulation import simulate
from eagle_tools.bench.report import write_json
from eagle_tools.bench.rich_output import Console, Progress
from eagle_tools.bench.servers import BenchError, ServerAddress

PROMPTS = DEMO / "prompts.json"
BATCHES = (1, 2, 4, 8, 16, 32, 48)
TABLE_WIDTH = 144  # the table needs it, also if the output is not a terminal
REAL_SHARE = 0.8  # the part of the context that real conversations plan: their tokens are known only afterwards
WARM = 0.25  # the part of the simulated time that is not counted: caches fill, conversations begin
EPILOG = """\
examples:
  python -m eagle_tools.bench.replicas                                 the demo, 1 to 100 replicas
  python -m eagle_tools.bench.replicas --replicas 1 10 100 1000 --load 1.5
  python -m eagle_tools.bench.replicas --measure http://gpu1:30000 --beginning-tokens 1500 --answer-tokens 300
  python -m eagle_tools.bench.replicas --costs bench-results/costs.json --arrivals bursty
  python -m eagle_tools.bench.replicas --replay http://127.0.0.1:30000 --seconds 30
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.replicas",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--costs", type=Path, default=DEMO_COSTS, metavar="FILE", help="measured costs (the demo's)")
    source.add_argument("--measure", metavar="URL", help="measure an idle server, and keep its costs.json in --out")
    parser.add_argument(
        "--replay", metavar="URL", help="hold conversations with the server of these costs, and compare"
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=BATCHES,
        metavar="N",
        help="numbers of requests that --measure has decode together",
    )
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON list of texts to send (the demo's)")
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 3, 10, 30, 100], metavar="N", help="how many (1 3 10 30 100)"
    )
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="POLICY", help=", ".join(POLICIES)
    )
    parser.add_argument(
        "--load", type=float, default=0.8, help="turns/s per replica; 1: what it answers without a prefix cache (0.8)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="simulated seconds in which conversations begin; with --replay real ones (60)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the conversations (0)")
    habits = parser.add_argument_group("conversations (lengths and times are means)")
    helps = {
        "beginnings": "different beginnings; the k-th opens conversations in proportion to 1 / k",
        "beginning_tokens": "tokens of a beginning, all of this length",
        "turns": "turns of a conversation",
        "new_tokens": "tokens that a user adds in a turn",
        "answer_tokens": "tokens of an answer",
        "think": "seconds between an answer and the next turn",
    }
    for field in fields(Habits):
        if field.name in helps:
            kind, flag = type(field.default), f"--{field.name.replace('_', '-')}"
            text = f"{helps[field.name]} ({field.default:g})"
            habits.add_argument(flag, type=kind, default=field.default, metavar="N", help=text)
    habits.add_argument(
        "--arrivals",
        choices=(POISSON, BURSTY),
        default=POISSON,
        help="bursty: at times at three times the rate (poisson)",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for JSON and PNG")
    return parser


def main(argv: Sequence[str]) -> int:
    """Simulate, print and draw; returns 0, or 2 with one line on stderr."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    positive = ("load", "seconds", "beginnings", "think")
    least_one = ("turns", "new_tokens", "answer_tokens", "beginning_tokens")
    wrong = [name for name in positive if getattr(arguments, name) <= 0]
    wrong += [name for name in least_one if getattr(arguments, name) < 1]
    if wrong or min((*arguments.replicas, *arguments.batches)) < 1:
        parser.error(f"--{(wrong or ['replicas and --batches'])[0].replace('_', '-')}: too small")
    console = Console(width=TABLE_WIDTH)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        costs = _measure(arguments, console) if arguments.measure else read_costs(arguments.costs)
        print_costs(costs, console)
        habits = Habits(**{field.name: getattr(arguments, field.name) for field in fields(Habits)})
        # Every turn of a conversation is a request.
        rate = arguments.load * costs.turns_per_second(habits.mean_prompt(), habits.answer_tokens) / habits.turns
        if arguments.replay:
            _replay(arguments, costs, habits, rate, console)
            return 0
        points = _simulate(arguments, costs, habits, rate, console)
    except (BenchError, OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    load = f"{rate * habits.turns:.2f} turns/s per replica, {habits.arrivals}"
    print_points(points, f"simulated: {load}", console)
    results = {"costs": asdict(costs), "points": [asdict(point) for point in points]}
    write_json(arguments.out / "scaling.json", vars(arguments), results)
    plot_points(arguments.out / "scaling.png", points, costs)
    console.print(f"written: {arguments.out / 'scaling.json'}, {arguments.out / 'scaling.png'}")
    return 0


def _measure(arguments: argparse.Namespace, console: Console) -> ReplicaCosts:
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=steps(arguments.batches))
        server, texts = ServerAddress.of(arguments.measure), read_texts(arguments.prompts)
        costs = measure_costs(server, texts, arguments.batches, lambda: progress.advance(task))
    write_json(arguments.out / "costs.json", {"measure": arguments.measure}, {"costs": asdict(costs)})
    console.print(f"written: {arguments.out / 'costs.json'}")
    return costs


def _simulate(
    arguments: argparse.Namespace, costs: ReplicaCosts, habits: Habits, rate: float, console: Console
) -> list[Point]:
    points, seconds = [], arguments.seconds
    with Progress(console=console) as progress:
        total = sum(arguments.replicas) * len(arguments.policies)
        task = progress.add_task("simulating", total=total)
        for replicas in arguments.replicas:
            conversations = _converse(costs, habits, rate * replicas, arguments)
            done = progress.tasks[0].completed
            for policy in arguments.policies:

                def advance(now: float, done: float = done, share: int = replicas) -> None:
                    progress.update(task, completed=done + share * now / seconds)

                outcome = simulate(costs, conversations, replicas, POLICIES[policy](replicas), advance)
                points.append(Point(replicas, policy, outcome.summary(WARM * seconds, seconds)))
                done += replicas
                progress.update(task, completed=done)
    return points


def _replay(arguments: argparse.Namespace, costs: ReplicaCosts, habits: Habits, rate: float, console: Console) -> None:
    """Real conversations on one server, and the same ones simulated."""
    planned = converse(habits, rate, arguments.seconds, int(costs.context_length * REAL_SHARE), arguments.seed)
    server, texts = ServerAddress.of(arguments.replay), read_texts(arguments.prompts)
    server.post("/flush_cache", {})
    with Progress(console=console) as progress:
        task = progress.add_task(
            f"{sum(len(conversation.turns) for conversation in planned)} turns", total=len(planned)
        )
        measured, counted = replay(server, planned, texts, lambda: progress.advance(task))
    simulated = simulate(costs, counted, 1, POLICIES["round-robin"](1))
    end = max(float(times.ended.max()) for times in (measured, simulated))
    results = {"measured": measured.summary(0.0, end), "simulated": simulated.summary(0.0, end)}
    print_replay(results["measured"], results["simulated"], console)
    write_json(arguments.out / "replay.json", vars(arguments), results)
    console.print(f"written: {arguments.out / 'replay.json'}")


def _converse(costs: ReplicaCosts, habits: Habits, rate: float, arguments: argparse.Namespace) -> list[Dialogue]:
    conversations = converse(habits, rate, arguments.seconds, costs.context_length, arguments.seed)
    if not conversations:
        raise BenchError(f"no conversation begins in {arguments.seconds:g} s and fits: raise --seconds or --load")
    return conversations


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
