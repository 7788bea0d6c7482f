"""`eagle-server train evaluate`: how a served head drafts on conversations, by the server's own counters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_tools.training.rows.chat_records import ChatRecord
from eagle_tools.training.rows.regenerate import Regeneration, in_order
from eagle_tools.training.rows.served_answers import AnswerClient, ServedAnswer

PLAIN = {"speculative": False}


@dataclass(frozen=True)
class AcceptCounts:
    """What one pass over a data set counted. histogram[a]: cycles that accepted a drafts, of all requests."""

    tokens: int
    seconds: float
    histogram: Sequence[int] = ()
    answers: int = 0
    failed: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens per cycle with drafts, the bonus included; 0 without drafts."""
        cycles = sum(self.histogram)
        return 1 + sum(a * count for a, count in enumerate(self.histogram)) / cycles if cycles else 0.0

    @property
    def by_position(self) -> list[float]:
        """How often the first, second, ... draft of a cycle was accepted."""
        cycles = sum(self.histogram)
        return [sum(self.histogram[place:]) / cycles for place in range(1, len(self.histogram))] if cycles else []

    @property
    def speed(self) -> float:
        """Tokens/s of all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def with_other(self, other: AcceptCounts) -> AcceptCounts:
        """Both counts together."""
        longest = max(len(self.histogram), len(other.histogram))
        both = [[*h, *[0] * (longest - len(h))] for h in (self.histogram, other.histogram)]
        return AcceptCounts(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            [a + b for a, b in zip(*both, strict=True)],
            self.answers + other.answers,
            self.failed + other.failed,
        )


class CountedClient(AnswerClient):
    """A client that adds up what its answers say of drafts."""

    total = AcceptCounts(0, 0.0)

    async def answer(self, body: Mapping[str, Any]) -> ServedAnswer:
        """See `AnswerClient.answer`."""
        answer = await super().answer(body)
        self.total = self.total.with_other(AcceptCounts(len(answer.ids), 0.0, answer.histogram, answers=1))
        return answer


@dataclass(frozen=True)
class Evaluation:
    """The counts of a data set, with drafts and without."""

    name: str
    conversations: int
    drafted: AcceptCounts
    plain: AcceptCounts | None

    def numbers(self) -> dict[str, Any]:
        """The results as values of JSON."""
        values = {
            "name": self.name,
            "conversations": self.conversations,
            "answers": self.drafted.answers,
            "failed": self.drafted.failed,
            "tokens": self.drafted.tokens,
            "accept_length": round(self.drafted.accept_length, 4),
            "acceptance_by_position": [round(rate, 4) for rate in self.drafted.by_position],
            "acceptance_histogram": list(self.drafted.histogram),
            "tokens_per_second": round(self.drafted.speed, 2),
        }
        if self.plain is None:
            return values
        speeds = {"plain_tokens_per_second": round(self.plain.speed, 2)}
        return (
            values | speeds | {"speedup": round(self.drafted.speed / self.plain.speed, 3) if self.plain.speed else None}
        )


async def evaluate(
    client: CountedClient, how: Regeneration, datasets: Mapping[Path, Sequence[ChatRecord]], *, plain: bool
) -> list[Evaluation]:
    """Each data set with drafts, and without if `plain`; of several also all together.

    Raises:
        ServerLost: the server is gone.
    """
    body = {"model": await client.model(), **how.sampling}
    first = next(iter(datasets.values()))[0]
    await _measured(client, replace(how, sampling={}), [first], {**body, "max_tokens": 8})  # the first answer is slow
    found = []
    for file, records in datasets.items():
        counts = []
        for extra in ({}, PLAIN) if plain else ({},):
            await client.flush_cache()
            counts.append(await _measured(client, how, records, {**body, **extra}))
        found.append(Evaluation(file.name, len(records), counts[0], counts[1] if plain else None))
    if len(found) > 1:
        drafted, without = found[0].drafted, found[0].plain
        for each in found[1:]:
            drafted = drafted.with_other(each.drafted)
            without = without.with_other(each.plain) if without is not None and each.plain is not None else None
        found.append(Evaluation("together", sum(each.conversations for each in found), drafted, without))
    return found


async def _measured(
    client: CountedClient, how: Regeneration, records: Sequence[ChatRecord], body: Mapping[str, Any]
) -> AcceptCounts:
    client.total, failed, begin = AcceptCounts(0, 0.0), 0, time.perf_counter()
    async for done in in_order(client, how, [(record, how.temperatures[0]) for record in records], body):
        failed += done.error is not None
    return replace(client.total, seconds=time.perf_counter() - begin, failed=failed)


def table(evaluations: Sequence[Evaluation]) -> str:
    """The results as a text."""
    lines = [
        f"{'data':24} {'chats':>6} {'tokens':>8} {'length':>7} {'tokens/s':>9} {'plain':>8} {'ratio':>6}  by position"
    ]
    for each in evaluations:
        numbers, plain = each.numbers(), each.plain
        speeds = f"{plain.speed:8.1f} {numbers['speedup'] or 0:6.2f}" if plain is not None else f"{'':8} {'':6}"
        rates = " ".join(f"{100 * rate:.0f} %" for rate in each.drafted.by_position)
        lines.append(
            f"{each.name[:24]:24} {each.conversations:6} {each.drafted.tokens:8} {each.drafted.accept_length:7.3f} "
            f"{each.drafted.speed:9.1f} {speeds}  {rates}"
            + (f"  ({each.drafted.failed} failed)" if each.drafted.failed else "")
        )
    return "\n".join(lines)
