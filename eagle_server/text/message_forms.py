"""Conversations as chat templates with narrow rules take them.

Agents send system messages in any place, several of them, or nothing else, and several messages of one role in a row.
Many templates refuse that, or leave a message out. Each form here says the same with fewer kinds of turns: no text is
lost, and texts keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Messages = list[dict[str, Any]]


class Written(str):
    """Arguments that are no JSON object, as a model wrote them. The filter `tojson` prints them unchanged."""

    __slots__ = ()


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Messages]:
    """The messages as given, then in forms that more templates take. Values are shared: do not change them."""
    given = [dict(message) for message in messages]
    yield given
    joined = _with_one_system_message(given)
    turns = _joined_turns([*joined[:1], *(_as_user(message) for message in joined[1:])])
    without = _joined_turns([_as_user(message) for message in joined])
    tried = [given]
    for form in (given, joined, turns, without):
        for kept in (form, _with_objects(form)):
            if kept not in tried:
                tried.append(kept)
                yield kept


def says_all(text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rendered text has the texts of all users and of the system, those after the first message in order.

    Earlier answers are not looked for: templates cut their thinking. The first system message may stand anywhere, as
    some templates put it before the last turn. Templates may trim texts. Arguments that stay as they were written must
    be there, too.
    """
    if not all(str(arguments) in text for arguments in _written(messages)):
        return False
    place = 0
    for number, message in enumerate(messages):
        wanted = message["content"].strip()
        if message["role"] not in ("system", "developer", "user") or not wanted:
            continue
        found = text.find(wanted, place if number else 0)
        if found < 0:
            return False
        place = found + len(wanted) if message["role"] == "user" or number else place
    return True


def _written(messages: Sequence[Mapping[str, Any]]) -> Iterator[Written]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = (call.get("function") or {}).get("arguments")
            if isinstance(arguments, Written):
                yield arguments


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _with_one_system_message(messages: Messages) -> Messages:
    """The system messages at the beginning as one."""
    begin = list(takewhile(_is_system, messages))
    return [*([_join(begin)] if begin else []), *messages[len(begin) :]]


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    """A system message as a user's."""
    return {**message, "role": "user"} if _is_system(message) else message


def _joined_turns(messages: Messages) -> Messages:
    """Messages of one role in a row as one. Results of tools stay apart."""
    turns: Messages = []
    for message in messages:
        if turns and turns[-1]["role"] == message["role"] != "tool":
            turns[-1] = _join([turns[-1], message])
        else:
            turns.append(message)
    return turns


def _join(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One message with the texts of several, between blank lines, and all their calls and thoughts."""
    joined: dict[str, Any] = {}
    for message in messages:
        joined |= {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    joined["content"] = "\n\n".join(message["content"] for message in messages if message["content"])
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if thoughts:
        joined["reasoning_content"] = "\n\n".join(thoughts)
    return joined | ({"tool_calls": calls} if calls else {})


def _with_objects(messages: Messages) -> Messages:
    """Arguments that are no object as one with their text, for templates that go through arguments."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    if not isinstance(function.get("arguments"), Written):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": str(function["arguments"])}}}
