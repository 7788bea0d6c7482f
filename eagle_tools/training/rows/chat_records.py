"""Conversations in the formats of others: OpenAI's messages, ShareGPT's turns, prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_server.text.message_forms import Written
from eagle_tools.training.rows.token_rows import RowError, row_id

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
_RECORD_KEYS = {"id", "messages", "conversations", "prompt", "system", "tools", "chat_template_kwargs"}
CONVERSATION_KEYS = ("messages", "conversations", "prompt")


@dataclass(frozen=True)
class ChatRecord:
    """One conversation, with its messages as chat templates take them."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs


@dataclass(frozen=True)
class RecordReader:
    """Reads the conversations of `file`. `ignored`: keys of rows and of messages that say nothing of interest."""

    file: Path
    ignored: frozenset[str] = frozenset()

    def record(self, number: int, values: Mapping[str, Any]) -> ChatRecord:
        """The conversation of a row.

        Raises:
            RowError: a key, a role or a value is unknown.
        """
        values = {key: value for key, value in values.items() if key not in self.ignored and value is not None}
        if unknown := sorted(set(values) - _RECORD_KEYS):
            raise self._refusal(number, f"unknown key {unknown[0]!r}; --ignore {unknown[0]} leaves it out")
        kinds = [key for key in CONVERSATION_KEYS if key in values]
        if len(kinds) != 1:
            raise self._refusal(number, f"one of {', '.join(CONVERSATION_KEYS)} is expected")
        given = values[kinds[0]]
        turns = [{"role": "user", "content": given}] if kinds[0] == "prompt" else given
        if not isinstance(turns, list) or not turns:
            raise self._refusal(number, f"{kinds[0]} should be a list of messages")
        messages = [self._message(number, place, turn) for place, turn in enumerate(turns)]
        if "system" in values:
            messages.insert(0, {"role": "system", "content": self._text(number, "system", values["system"])})
        return ChatRecord(
            id=row_id(self.file, number, values),
            messages=messages,
            tools=self._tools(number, values.get("tools", [])),
            variables=self._object(number, "chat_template_kwargs", values.get("chat_template_kwargs", {})),
        )

    def _message(self, number: int, place: int, given: Any) -> dict[str, Any]:
        where = f"message {place + 1}"
        turn = {k: v for k, v in self._object(number, where, given).items() if k not in self.ignored and v is not None}
        if "from" in turn:
            role = _SHAREGPT_ROLES.get(str(turn.pop("from")))
            turn = {"role": role or "?", "content": turn.pop("value", None), **turn}
        if unknown := sorted(set(turn) - _MESSAGE_KEYS):
            raise self._refusal(number, f"{where}: unknown key {unknown[0]!r}")
        role = turn.get("role")
        if role not in ROLES:
            raise self._refusal(number, f"{where}: the role should be one of {', '.join(ROLES)}, or ShareGPT's")
        calls = [self._call(number, where, call) for call in self._list(number, where, turn.get("tool_calls", []))]
        if calls and role != "assistant":
            raise self._refusal(number, f"{where}: tool_calls belong to the assistant")
        if turn.get("content") is None and role != "assistant":
            raise self._refusal(number, f"{where}: it has no content")
        message = {"role": role, "content": self._content(number, where, turn.get("content", ""))}
        for key in ("name", "tool_call_id"):
            if key in turn:
                message[key] = self._text(number, f"{where}: {key}", turn[key])
        thoughts = [turn[key] for key in ("reasoning_content", "reasoning", "thinking") if key in turn]
        if thoughts:
            message["reasoning_content"] = self._text(number, f"{where}: reasoning_content", thoughts[0])
        return message | ({"tool_calls": calls} if calls else {})

    def _content(self, number: int, where: str, content: Any) -> str:
        """The content as one text; parts are joined by line breaks, as the server does."""
        if isinstance(content, str):
            return content
        parts = self._list(number, where, content)
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise self._refusal(number, f"{where}: content should be a text, or a list of parts with a text each")
        return "\n".join(part["text"] for part in parts)

    def _call(self, number: int, where: str, given: Any) -> dict[str, Any]:
        """A tool call as templates expect it: with its arguments as an object, or as they were written."""
        call = self._object(number, where, given)
        function = self._object(number, where, call.get("function", call))
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except ValueError:
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else Written(arguments)
        name = self._text(number, f"{where}: the name of a tool", function.get("name"))
        return {"type": "function", "id": call.get("id"), "function": {"name": name, "arguments": arguments}}

    def _tools(self, number: int, given: Any) -> Sequence[Mapping[str, Any]]:
        if isinstance(given, str):  # as some data sets store them
            try:
                given = json.loads(given)
            except ValueError:
                raise self._refusal(number, "tools should be a list, or a list as JSON text") from None
        return [self._object(number, "tools", tool) for tool in self._list(number, "tools", given)]

    def _list(self, number: int, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self._refusal(number, f"{where}: a list is expected")
        return value

    def _object(self, number: int, where: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._refusal(number, f"{where}: a JSON object is expected")
        return value

    def _text(self, number: int, where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._refusal(number, f"{where} should be a text")
        return value

    def _refusal(self, number: int, reason: str) -> RowError:
        return RowError(self.file, number, reason)
