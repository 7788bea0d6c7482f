"""A conversation: its messages and settings, the commands that change them, and one answer after the other."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from eagle_tools.chat.answer import COMPLETION_TOKENS, StreamedAnswer
from eagle_tools.chat.connection import ChatFailure, Connection, Served
from eagle_tools.chat.screen import Screen

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")  # parameters of the API
HELP = f"""\
/system TEXT     set the system message; without TEXT: none
/clear           forget the conversation
/colors          show which tokens were drafted, or stop it
/NAME NUMBER     set {", ".join(SETTINGS)}; without NUMBER: the server's default
/help            this
/exit, Ctrl-D    end; Ctrl-C stops an answer
\"\"\"              begins and ends a message of several lines"""


class Ended(Exception):
    """The user has asked for the end."""


@dataclass
class ChatSession:
    """What is said between the user and a model. A model without a chat template continues each text by itself."""

    connection: Connection
    served: Served
    screen: Screen
    system: str | None = None
    settings: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def handle(self, text: str) -> None:
        """A line of the user: a command, or a message to answer; errors are shown.

        Raises:
            Ended: it was /exit.
        """
        if not text.strip():
            return
        name, _, rest = text.strip().partition(" ")
        if name.startswith("/") and "\n" not in text and "/" not in name[1:]:
            self._command(name[1:].replace("-", "_"), rest.strip())
            return
        try:
            self.answer(text)
        except ChatFailure as error:
            self.screen.fail(str(error))

    def answer(self, text: str) -> bool:
        """Send a message and print the answer; returns whether it is whole. An interrupted one is kept in part.

        Raises:
            ChatFailure: the request was refused or failed; the message is forgotten then.
        """
        answer, stopped = StreamedAnswer(has_trees=self.served.has_trees), False
        path, body = self._request(text)
        with closing(self.connection.events(path, body)) as events:
            try:
                for event in events:
                    for piece in answer.take(event):
                        self.screen.show(piece)
            except KeyboardInterrupt:
                stopped = True
        self.screen.end_line()
        if answer.text or not stopped:
            said = [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]
            self.messages += said if self.served.has_template else []
        if stopped:
            self.screen.note("[stopped]")
        else:
            self.screen.conclude(answer)
        return not stopped

    def _request(self, text: str) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self.served.model, "stream_options": {"include_usage": True}, **self.settings}
        if self.served.has_trees:
            body["return_trees"] = True
        if not self.served.has_template:
            return "v1/completions", {"prompt": text, "max_tokens": COMPLETION_TOKENS, **body}
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        body["messages"] = [*first, *self.messages, {"role": "user", "content": text}]
        return "v1/chat/completions", body

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "exit" | "quit" | "bye":
                raise Ended
            case "help" | "?":
                self.screen.note(HELP)
            case "clear":
                self.messages.clear()
                self.screen.note("The conversation is forgotten.")
            case "system":
                self.system = rest or None
                said = "" if self.served.has_template else " It has no effect without a chat template."
                self.screen.note(("The system message is set." if rest else "There is no system message.") + said)
            case "colors" | "colours":
                self.screen.colors = not self.screen.colors
                self.screen.note(f"Colours are {'on' if self.screen.colors else 'off'}.")
            case _ if name in SETTINGS:
                self._set(name, rest)
            case _:
                self.screen.note(f"There is no command /{name}; /help shows them.")

    def _set(self, name: str, value: str) -> None:
        if not value:
            self.settings.pop(name, None)
            self.screen.note(f"{name} is the server's default.")
            return
        try:
            self.settings[name] = number(value)
        except ValueError:
            self.screen.note(f"{name} should be a number, not {value!r}.")
        else:
            self.screen.note(f"{name} is {value}.")


def number(text: str) -> float:
    """A number as JSON writes it: whole ones stay whole.

    Raises:
        ValueError: it is not a number.
    """
    value = json.loads(text)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise ValueError(text)
    return value
