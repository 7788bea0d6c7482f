"""`eagle-server chat`: a conversation in the terminal, with a running server or with one that it starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

from eagle_server.config import parse_args
from eagle_server.config.commands import (
    CommandParser,
    count,
    environment_value,
    environment_without,
    flags_of,
    temperature,
)
from eagle_tools.chat.connection import ChatFailure, Connection
from eagle_tools.chat.own_server import OwnServer
from eagle_tools.chat.screen import Screen
from eagle_tools.chat.session import COMPLETION_TOKENS, ChatSession, Ended

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'
FAILURE_STATUS, INTERRUPTED_STATUS = 1, 130
SERVES_ALONE = "the chat's own server listens on a socket of its own"
NO_TEMPLATE_NOTE = (
    "This model has no chat template, so each text is continued by itself, without what was said before. "
    "--chat-template FILE, where it is served, makes it a chat."
)

_DESCRIPTION = """\
Talk to a model in the terminal. With --url to one that is served; otherwise the options of the model, the drafter and
its trees are the same as when serving (`eagle-server --help`), and the model is served until the chat ends.

Where stdin is no terminal, all of it is one message, and only the answer is printed."""

_EXAMPLES = """\
examples:
  eagle-server chat meta-llama/Llama-3.1-8B-Instruct --speculative-draft-model-path yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
  eagle-server chat http://127.0.0.1:30000 --colors
  eagle-server chat --url unix:/run/eagle.sock
  echo "def fibonacci(n):" | eagle-server chat --temperature 0

/help shows the commands of a chat"""


def main(argv: Sequence[str]) -> int:
    """Chat until the user ends it; returns the exit status. A user's error is one line on stderr and status 2."""
    parser = _parser()
    rest = list(argv)
    if argv and not argv[0].startswith("-"):
        rest.insert(0, "--url" if argv[0].startswith(("http://", "https://", "unix:")) else "--model-path")
    options, flags = parser.split(rest, dict.fromkeys(flags_of("server"), SERVES_ALONE))
    if options.url is not None and flags:
        parser.error(f"{flags[0]}: --url names a server, which has its own options; drop one of them")
    screen = Screen(colors=options.colors)
    with ExitStack() as opened:
        try:
            _talk(options, _connected(options, flags, screen, opened), screen)
        except ChatFailure as error:
            screen.fail(f"eagle_server: error: {error}")
            return FAILURE_STATUS
        except KeyboardInterrupt:
            return INTERRUPTED_STATUS
    return 0


def _connected(options: argparse.Namespace, flags: Sequence[str], screen: Screen, opened: ExitStack) -> Connection:
    """A client of the server at --url, or of one that is started now and ends with `opened`.

    Raises:
        ChatFailure: it cannot be started.
    """
    if options.url is not None:
        key = options.api_key or environment_value("api-key")
        return opened.enter_context(closing(Connection(options.url, key)))
    environment = environment_without("server")
    config = parse_args(flags, environment)
    for name in ("api_key", "api_key_file", "ssl_certfile"):
        if getattr(config.server, name) is not None:  # given in the file of --config
            raise ChatFailure(f"--{name.replace('_', '-')}: {SERVES_ALONE}; drop it")
    server = opened.enter_context(OwnServer(flags, environment))
    connection = opened.enter_context(closing(Connection(server.url, None)))
    server.wait(connection, screen, config.served_model_name)
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
    _converse(session)


def _converse(session: ChatSession) -> None:
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


def _parser() -> CommandParser:
    parser = CommandParser("eagle-server chat", _DESCRIPTION, _EXAMPLES, first="[MODEL] ")
    parser.add_argument("--url", metavar="URL", help="a running server, like http://127.0.0.1:30000 or unix:PATH")
    parser.add_argument("--api-key", metavar="KEY", help="its key; better set EAGLE_SERVER_API_KEY, as ps shows flags")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=temperature, metavar="T", help="0 is greedy (the server's default)")
    parser.add_argument(
        "--max-tokens",
        type=count,
        metavar="N",
        help=f"most tokens of an answer (what fits; {COMPLETION_TOKENS} for a model without a chat template)",
    )
    parser.add_argument("--seed", type=int, help="seed of the draws (random)")
    parser.add_argument("--colors", action="store_true", help="show which tokens were drafted; /colors changes it")
    return parser
