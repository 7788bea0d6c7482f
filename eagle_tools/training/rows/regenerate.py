"""`eagle-server train regenerate`: conversations whose answers the served model writes anew, as token rows.

Rows are written in the order of the conversations, those of one together. So a run that was killed leaves a beginning
of the file that an undisturbed run writes, and the next run goes on there.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any
from zlib import crc32

from tqdm import tqdm

from eagle_tools.training.rows.chat_records import ChatRecord, RecordReader
from eagle_tools.training.rows.served_answers import (
    AnswerClient,
    AnswerFailed,
    ServedAnswer,
    calls_of,
    request_message,
)
from eagle_tools.training.rows.token_rows import TokenRow, numbered_objects

_AHEAD = 32  # conversations, times the concurrency, that may be answered before one that still runs
FAILED = ".failed.jsonl"


@dataclass(frozen=True)
class Regeneration:
    """What is asked of the server. temperatures: of the conversations in turn. sampling: of every request."""

    temperatures: Sequence[float] = (0.0,)
    concurrency: int = 32
    sampling: Mapping[str, Any] = field(default_factory=dict)
    keeps_thinking: bool = False  # earlier thinking stays in the history
    variables: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs, unless a row sets them


@dataclass(frozen=True)
class Regenerated:
    """The rows of one conversation, or why there are none."""

    record: ChatRecord
    rows: Sequence[TokenRow] = ()
    error: str | None = None


async def answered(client: AnswerClient, record: ChatRecord, body: Mapping[str, Any], *, thinking: bool) -> Regenerated:
    """The conversation with new answers: one after each message of a user, and after each recorded result of a tool.

    Tools are not run: a new call gets the recorded result in its place. The conversation ends early where there is
    none, the tool is another, or several are called at once.

    Raises:
        ServerLost: the server is gone.
    """
    history: list[Mapping[str, Any]] = []
    rows: list[TokenRow] = []
    try:
        for opening, results in _turns(record):
            history += map(request_message, opening)
            for result in [*results, None]:
                answer = await client.answer({**body, "messages": history})
                rows.append(_row(record, len(rows), answer))
                history.append(_kept(answer.message, thinking=thinking))
                calls = calls_of(answer.message)
                if not calls:
                    break
                if result is None or len(calls) > 1 or result[0] != calls[0]["function"]["name"]:
                    return Regenerated(record, rows)
                history.append({"role": "tool", "tool_call_id": calls[0].get("id"), "content": result[1]})
    except AnswerFailed as failure:
        return Regenerated(record, error=str(failure))
    return Regenerated(record, rows) if rows else Regenerated(record, error="it has no message of a user")


def _turns(record: ChatRecord) -> Iterator[tuple[list[Mapping[str, Any]], list[tuple[str, str]]]]:
    """What comes before each answer to a user, and the (tool, result) pairs that were recorded after it."""
    opening: list[Mapping[str, Any]] = []
    results: list[tuple[str, str]] = []
    names: dict[Any, str] = {}
    called: list[str] = []
    is_open = False
    for message in record.messages:
        role = message["role"]
        if role == "assistant":
            for call in calls_of(message):
                called.append(call["function"]["name"])
                names[call.get("id")] = called[-1]
        elif role == "tool":
            results.append((names.get(message.get("tool_call_id")) or (called or [""])[-1], message["content"]))
        else:
            if is_open and role == "user":
                yield opening, results
                opening, results, called, is_open = [], [], [], False
            opening.append(message)
            is_open = is_open or role == "user"
    if is_open:
        yield opening, results


def _row(record: ChatRecord, gen: int, answer: ServedAnswer) -> TokenRow:
    mask = (0,) * len(answer.prompt_ids) + (1,) * len(answer.ids)
    return TokenRow(record.id, gen, answer.prompt_ids + answer.ids, mask, answer.finish_reason)


def _kept(message: Mapping[str, Any], *, thinking: bool) -> dict[str, Any]:
    names = ("role", "content", "tool_calls", *(("reasoning_content",) if thinking else ()))
    return {name: message[name] for name in names if message.get(name) is not None}


@dataclass
class RowFiles:
    """The file of rows and the file of failures. Every id that is in one of them is settled."""

    out: Path

    @property
    def failures(self) -> Path:
        return self.out.with_name(self.out.name + FAILED)

    def resume(self) -> set[str]:
        """The settled ids of an earlier run. The last conversation may be torn, so its rows are cut off."""
        settled = _cut(self.out, last=True) | _cut(self.failures, last=False)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.touch()
        return settled

    def write(self, done: Regenerated) -> None:
        """Append a conversation to one of the files."""
        if done.error is None:
            lines, file = "".join(row.line() + "\n" for row in done.rows), self.out
        else:
            lines, file = json.dumps(_failure(done), ensure_ascii=False) + "\n", self.failures
        with file.open("ab") as opened:
            opened.write(lines.encode())


def _failure(done: Regenerated) -> dict[str, Any]:
    """The conversation as a row that can be data again, and why it failed."""
    record = done.record
    row: dict[str, Any] = {"id": record.id, "error": done.error, "messages": list(record.messages)}
    others = {"tools": list(record.tools), "chat_template_kwargs": dict(record.variables)}
    return row | {name: value for name, value in others.items() if value}


def _cut(file: Path, *, last: bool) -> set[str]:
    """The ids in a file, after a torn line was cut off, and all rows of the last id if `last`."""
    if not file.is_file():
        return set()
    ends: dict[str, int] = {}  # where the first row of each id begins
    place = 0
    with file.open("rb+") as opened:
        for line in opened:
            if not line.endswith(b"\n"):
                break
            ends.setdefault(str(json.loads(line)["id"]), place)
            place += len(line)
        if last and ends:
            _, place = ends.popitem()
        opened.truncate(place)
    return set(ends)


async def regenerate(
    client: AnswerClient, how: Regeneration, records: Sequence[ChatRecord], files: RowFiles, model: str | None = None
) -> Counter[str]:
    """Answer all conversations that are not settled.

    Returns counts: conversations, answered, failed, earlier (settled before), rows, tokens (generated now).

    Raises:
        ServerLost: the server is gone; what was answered is written.
    """
    settled = files.resume()
    body = {"model": model or await client.model(), **how.sampling}
    open_records = [
        (record, temperature)
        for record, temperature in zip(records, cycle(how.temperatures))
        if record.id not in settled
    ]
    counts = Counter(conversations=len(records), earlier=len(records) - len(open_records))
    with tqdm(total=len(records), initial=counts["earlier"], desc="regenerate", unit="chat") as bar:
        async for done in in_order(client, how, open_records, body):
            files.write(done)
            counts["failed" if done.error is not None else "answered"] += 1
            counts["rows"] += len(done.rows)
            counts["tokens"] += sum(row.supervised for row in done.rows)
            bar.update()
            seconds = bar.format_dict["elapsed"]
            bar.set_postfix(
                {"tokens/s": f"{counts['tokens'] / seconds:.0f}" if seconds else "", "failed": counts["failed"]}
            )
    return counts


async def in_order(
    client: AnswerClient, how: Regeneration, records: Sequence[tuple[ChatRecord, float]], body: Mapping[str, Any]
) -> AsyncIterator[Regenerated]:
    """The conversations in their order. So many run at once, and some may be ahead of one that takes long."""
    slots = asyncio.Semaphore(how.concurrency)

    async def one(record: ChatRecord, temperature: float) -> Regenerated:
        # The seed makes a resumed run the same above temperature 0, too.
        asked: dict[str, Any] = {**body, "temperature": temperature, "seed": crc32(record.id.encode())}
        if record.tools:
            asked["tools"] = list(record.tools)
        if variables := {**how.variables, **record.variables}:
            asked["chat_template_kwargs"] = variables
        async with slots:
            return await answered(client, record, asked, thinking=how.keeps_thinking)

    tasks: list[asyncio.Task[Regenerated]] = []
    waiting = iter(records)
    try:
        while True:
            for record, temperature in waiting:
                tasks.append(asyncio.create_task(one(record, temperature)))
                if len(tasks) >= _AHEAD * how.concurrency:
                    break
            if not tasks:
                return
            yield await tasks.pop(0)
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def read_records(files: Sequence[Path], ignored: frozenset[str] = frozenset()) -> list[ChatRecord]:
    """The conversations of files.

    Raises:
        RowError: a row is no conversation.
        ValueError: an id occurs twice.
    """
    records: dict[str, ChatRecord] = {}
    for file in files:
        reader = RecordReader(file, ignored)
        for number, values in numbered_objects(file):
            record = reader.record(number, values)
            if record.id in records:
                raise ValueError(f"{file}: row {number}: the id {record.id!r} occurs twice")
            records[record.id] = record
    return list(records.values())
