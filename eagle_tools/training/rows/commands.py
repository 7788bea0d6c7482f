"""The stages of `eagle-server train` that make token rows."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Callable
from typing import Any

from eagle_server.config import parse_args
from eagle_server.config.commands import environment_value
from eagle_tools.bench.servers import BenchError, running
from eagle_tools.training.capture import Capture, capture
from eagle_tools.training.rows.evaluation import CountedClient, Evaluation, evaluate, table
from eagle_tools.training.rows.masking import ChatModel
from eagle_tools.training.rows.prepare import Preparation, prepare
from eagle_tools.training.rows.regenerate import Regeneration, RowFiles, read_records, regenerate
from eagle_tools.training.rows.served_answers import AnswerClient, ServerLost


def _prepare(parsed: argparse.Namespace) -> None:
    preparation = Preparation(
        model=ChatModel.load(parsed.model_path, parsed.chat_template),
        preformatted=parsed.preformatted,
        ignored=frozenset(parsed.ignore),
        variables=json_object("--chat-template-kwargs", parsed.chat_template_kwargs),
    )
    counts = prepare(preparation, parsed.data, parsed.out)
    print(f"{parsed.out}: {counts['rows']} rows, {counts['tokens']} tokens, {counts['supervised']} to train on")


def _regenerate(parsed: argparse.Namespace) -> None:
    if parsed.concurrency < 1:
        raise ValueError("--concurrency should be at least 1")
    sampling = json_object("--sampling", parsed.sampling)
    if parsed.max_tokens is not None:
        sampling["max_tokens"] = parsed.max_tokens
    how = Regeneration(
        temperatures=tuple(parsed.temperature),
        concurrency=parsed.concurrency,
        sampling=sampling,
        keeps_thinking=parsed.keep_thinking,
        variables=json_object("--chat-template-kwargs", parsed.chat_template_kwargs),
    )
    records = read_records(parsed.data, frozenset(parsed.ignore))
    files = RowFiles(parsed.out)

    async def run() -> Counter[str]:
        client = AnswerClient(parsed.url, parsed.api_key or environment_value("api-key"), parsed.concurrency)
        try:
            return await regenerate(client, how, records, files, parsed.model)
        finally:
            await client.close()

    try:
        counts = asyncio.run(run())
    except ServerLost as error:
        raise ValueError(f"{error}; {parsed.out} has what was answered: run again to go on") from None
    failed = f" (see {files.failures})" if counts["failed"] else ""
    print(
        f"{counts['conversations']} conversations: {counts['answered']} answered, {counts['failed']} failed{failed}, ",
        end="",
    )
    print(f"{counts['earlier']} settled before; {counts['rows']} rows, {counts['tokens']} tokens generated")


def _evaluate(parsed: argparse.Namespace) -> None:
    if (parsed.url is None) == (parsed.target is None or parsed.head is None):
        raise ValueError("give --target and --head to be served, or the --url of a server that has them")
    datasets = {file: read_records([file], frozenset(parsed.ignore)) for file in parsed.data}
    if empty := [file for file, records in datasets.items() if not records]:
        raise ValueError(f"--data {empty[0]}: it has no conversations")
    how = Regeneration(
        temperatures=(parsed.temperature,),
        concurrency=parsed.concurrency,
        sampling={"max_tokens": parsed.max_tokens, **json_object("--sampling", parsed.sampling)},
    )

    async def measured(url: str) -> list[Evaluation]:
        client = CountedClient(url, parsed.api_key or environment_value("api-key"), parsed.concurrency)
        try:
            return await evaluate(client, how, datasets, plain=not parsed.no_plain)
        finally:
            await client.close()

    try:
        if parsed.url is not None:
            found = asyncio.run(measured(parsed.url))
        else:
            flags = ["--model-path", parsed.target, "--speculative-draft-model-path", parsed.head]
            with running("evaluated", [*flags, *shlex.split(parsed.serve)]) as server:
                found = asyncio.run(measured(f"http://{server.host}:{server.port}"))
    except (ServerLost, BenchError) as error:
        raise ValueError(str(error)) from None
    if parsed.json:
        settings = {"target": parsed.target, "head": parsed.head, "url": parsed.url, "serve": parsed.serve}
        requests = {
            "temperature": parsed.temperature,
            "concurrency": parsed.concurrency,
            "max_tokens": parsed.max_tokens,
        }
        print(json.dumps({**settings, **requests, "data": [each.numbers() for each in found]}, indent=2))
    else:
        print(table(found))


def _capture(parsed: argparse.Namespace) -> None:
    """`parsed.flags`: the server's."""
    fixed = ["--model-path", parsed.target, "--speculative-algorithm", "NONE", "--disable-radix-cache"]
    boundaries = tuple(parsed.aux_layers) if parsed.aux_layers else None
    asked = Capture(parsed.data, parsed.out, boundaries, parsed.length, parsed.max_gb)
    print(capture(asked, parse_args([*parsed.flags, *fixed])))


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """The object that an option has as JSON; nothing where it is not given.

    Raises:
        ValueError: it is no object.
    """
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"{option} {text}: a JSON object is expected")
    return values


ROW_STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": _prepare,
    "regenerate": _regenerate,
    "evaluate": _evaluate,
    "capture": _capture,
}
