"""`eagle-server chat`: a conversation in the terminal, with a running server or with one that it starts."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_server.config import parse_args
from eagle_server.config.commands import CommandParser, count, environment_without, flags_of, temperature
from eagle_tools import require_extra
from eagle_tools.chat.answer import COMPLETION_TOKENS

SERVES_ALONE = "the chat's own server listens on a socket of its own"

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
    model = ""
    if options.url is None:
        config = parse_args(flags, environment_without("server"))
        model = config.served_model_name
        for name in ("api_key", "api_key_file", "ssl_certfile"):
            if getattr(config.server, name) is not None:  # given in the file of --config
                parser.error(f"--{name.replace('_', '-')}: {SERVES_ALONE}; drop it")
    require_extra("chat")
    from eagle_tools.chat.conversation import converse  # imports packages that --help does not need

    return converse(options, flags, model)


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
