"""The stages of `eagle-server train` that make token rows."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

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
        key = parsed.api_key or os.environ.get("EAGLE_SERVER_API_KEY")
        client = AnswerClient(parsed.url, key, parsed.concurrency)
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


ROW_STAGES: dict[str, Callable[[argparse.Namespace], None]] = {"prepare": _prepare, "regenerate": _regenerate}
