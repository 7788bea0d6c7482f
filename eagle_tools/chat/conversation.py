"""The chat from its options on: connect to a server or start one, then answer the user's lines until they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

from eagle_server.config.commands import environment_value, environment_without
from eagle_tools.chat.connection import ChatFailure, Connection
from eagle_tools.chat.own_server import OwnServer
from eagle_tools.chat.screen import Screen
from eagle_tools.chat.session import ChatSession, Ended

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'
FAILURE_STATUS, INTERRUPTED_STATUS = 1, 130
NO_TEMPLATE_NOTE = (
    "This model has no chat template, so each text is continued by itself, without what was said before. "
    "--chat-template FILE, where it is served, makes it a chat."
)


def converse(options: argparse.Namespace, flags: Sequence[str], model: str) -> int:
    """Chat until the user ends it; returns the exit status. A user's error is one line on stderr.

    flags, model: of the server that is started, and what it serves; unused with --url.
    """
    screen = Screen(colors=options.colors)
    with ExitStack() as opened:
        try:
            _talk(options, _connected(options, flags, model, screen, opened), screen)
        except ChatFailure as error:
            screen.fail(f"eagle_server: error: {error}")
            return FAILURE_STATUS
        except KeyboardInterrupt:
            return INTERRUPTED_STATUS
    return 0


def _connected(
    options: argparse.Namespace, flags: Sequence[str], model: str, screen: Screen, opened: ExitStack
) -> Connection:
    """A client of the server at --url, or of one that is started now and ends with `opened`.

    Raises:
        ChatFailure: it cannot be started.
    """
    if options.url is not None:
        key = options.api_key or environment_value("api-key")
        return opened.enter_context(closing(Connection(options.url, key)))
    server = opened.enter_context(OwnServer(flags, environment_without("server")))
    connection = opened.enter_context(closing(Connection(server.url, None)))
    server.wait(connection, screen, model)
    return connection


def _talk(options: argparse.Namespace, connection: Connection, screen: Screen) -> None:
    """One message from a pipe, or a conversation with the user.

    Raises:
        ChatFailure: the server is not there; the one message of a pipe is refused or fails.
    """
    served = connection.served()
    values = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
    settings = {name: value for name, value in values.items() if value is not None}
    session = ChatSession(connection, served, screen, system=options.system, settings=settings)
    if not served.has_template:
        screen.warn(NO_TEMPLATE_NOTE)
    if not sys.stdin.isatty():
        text = sys.stdin.read()
        if text.strip() and not session.answer(text.strip() if served.has_template else text):
            raise KeyboardInterrupt
        return
    screen.note(f"{served.model}{f', drafts: {served.drafts}' if served.drafts else ''}. /help shows the commands.")
    _answer_lines(session)


def _answer_lines(session: ChatSession) -> None:
    import readline  # noqa: F401  # `input` then edits lines and remembers them

    while True:
        try:
            session.handle(_read())
        except (EOFError, Ended):
            return
        except KeyboardInterrupt:
            session.screen.note("\nCtrl-D or /exit ends the chat.")


def _read() -> str:
    """A line, or the lines between two QUOTES.

    Raises:
        EOFError: Ctrl-D.
    """
    line = input(PROMPT)
    if not line.startswith(QUOTES):
        return line
    lines = [line.removeprefix(QUOTES)]
    while not lines[-1].endswith(QUOTES):
        lines.append(input(CONTINUED))
    return "\n".join(lines).removesuffix(QUOTES)
