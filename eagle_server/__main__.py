"""`python -m eagle_server`, `eagle-server`: read the configuration, start the engine process, serve HTTP.

eagle-server [flags]               serve
eagle-server serve [MODEL] [flags] the same; MODEL is short for --model-path
eagle-server chat [MODEL] [flags]  talk to a model in the terminal
eagle-server tree | bench | train  draft trees in the terminal; a benchmark; training of targets and heads
eagle-server help [COMMAND]        the help of a command
"""

from __future__ import annotations

import signal

_on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in the imports below ends without a traceback

import asyncio
import difflib
import importlib
import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_server.api.app import create_app
from eagle_server.api.server import (
    INTERRUPTED_STATUS,
    TEMPORARY_ERRORS,
    TEMPORARY_STATUS,
    HttpServer,
    Lifecycle,
    listen,
)
from eagle_server.api.service import Service
from eagle_server.api.telemetry.request_record import log_context
from eagle_server.client.client import EngineClient
from eagle_server.client.supervisor import EngineFailed, Supervisor
from eagle_server.config import Config, HubGGUF, changed_options, parse_args
from eagle_server.config.other_names import OTHER_COMMANDS
from eagle_server.engine.logs import LogStyle, configure_logging
from eagle_server.engine.process import CONFIGURATION_STATUS, FAILURE_STATUS, EngineFactory, EngineProtocol, freeze
from eagle_server.text.chat_template_files import load_chat_template
from eagle_server.text.tokenizer import load_tokenizer
from eagle_server.version import version

signal.signal(signal.SIGINT, _on_interrupt)
logger = logging.getLogger("eagle_server")

# Loaded by name: a server needs neither them nor their packages. They check that their packages are installed.
COMMANDS = {
    "chat": "eagle_tools.chat.command",
    "tree": "eagle_tools.tree.command",
    "bench": "eagle_tools.bench.__main__",
    "train": "eagle_tools.training.__main__",
}
SERVE, HELP = "serve", "help"
EXAMPLE_BODY = r'{"prompt": "def fibonacci(n):\n", "max_tokens": 64, "temperature": 0}'


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives; return the exit status. A user's mistake is one line on stderr and status 2."""
    try:
        return _command(list(sys.argv[1:] if argv is None else argv) or [SERVE])
    except KeyboardInterrupt:  # another command, or a server that does not handle signals yet
        return INTERRUPTED_STATUS


def _command(words: list[str]) -> int:
    first, *rest = words
    if first == HELP:
        if len(rest) > 1:
            return _fail(f"help is for one command, not for {' '.join(rest)}", CONFIGURATION_STATUS)
        return _command([*rest, "--help"])
    if first in COMMANDS:
        status: int = importlib.import_module(COMMANDS[first]).main(rest)
        return status
    if first == SERVE:
        flags = ["--model-path", *rest] if rest and not rest[0].startswith("-") else rest
    elif not first.startswith("-"):
        return _fail(_unknown_command(first), CONFIGURATION_STATUS)
    else:
        flags = words
    config = parse_args(flags, more=_dry_run)
    try:
        config = _with_directory(config)
    except (OSError, ValueError) as error:
        return _fail(str(error), CONFIGURATION_STATUS)
    function = "build_engine" if config.device.tp_size == 1 else "build_rank"
    return run(config, EngineFactory("eagle_server.engine.assembly.from_config", function, (config,)))


def _unknown_command(name: str) -> str:
    known = (SERVE, *COMMANDS, HELP)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"unknown command {name}; {OTHER_COMMANDS.get(name, hint)}"


def _with_directory(config: Config) -> Config:
    """`config` with directories in the places of GGUF files."""
    if config.gguf is None and config.draft_gguf is None:
        return config
    from eagle_server.engine.assembly.from_config import with_directory  # imports torch

    return with_directory(config)


def _dry_run(config: Config) -> dict[str, Any]:
    """What --dry-run adds: the tree and the memory. A configuration that cannot fit is a user's mistake."""
    from eagle_server.engine.assembly.memory_estimate import (  # imports torch
        as_far_as_known,
        given_tree,
        memory_estimate,
        refusal,
    )

    is_here = not any(isinstance(file, HubGGUF) for file in (config.gguf, config.draft_gguf))
    config = as_far_as_known(_with_directory(config) if is_here else config)
    estimate = memory_estimate(config)
    if (reason := refusal(config, estimate)) is not None:
        raise ValueError(reason)
    return {"speculative": config.public_dict()["speculative"] | given_tree(config), "memory": estimate}


def run(config: Config, build: Callable[..., EngineProtocol]) -> int:
    """Serve the engine that `build` makes in a separate process, or in one for each rank."""
    logs = LogStyle(config.server.log_level, config.observability.log_format)
    configure_logging(logs, log_context)
    logger.debug("configuration: %s", json.dumps(config.public_dict()))
    logger.info("eagle_server %s %s", version(), " ".join(changed_options(config)))
    try:
        listener = listen(config.server.host, config.server.port, config.server.uds)
    except OSError as error:
        is_temporary = error.errno in TEMPORARY_ERRORS
        return _fail(error.strerror or str(error), TEMPORARY_STATUS if is_temporary else CONFIGURATION_STATUS)
    try:
        if config.server.url_file is not None:
            _write_url(config, config.server.url_file)
        tokenizer_path = config.model.tokenizer_path or config.target_path
        tokenizer = load_tokenizer(tokenizer_path)
        chat_template = load_chat_template(tokenizer_path, tokenizer, config.model.chat_template)
        client = EngineClient(max_waiting=config.server.max_queue_size)
        app = create_app(config, client, tokenizer, chat_template)
        password = config.server.ssl_keyfile_password
        server = HttpServer(
            app,
            on_malformed=app.state.on_malformed,
            ssl_certfile=config.server.ssl_certfile,
            ssl_keyfile=config.server.ssl_keyfile,
            ssl_keyfile_password=None if password is None else password.get_secret_value(),
        )
    except (OSError, ValueError) as error:
        return _fail(str(error), CONFIGURATION_STATUS)
    supervisor = Supervisor(
        build, client, ranks=config.device.tp_size, logs=logs, watchdog=config.server.watchdog_timeout
    )
    reload = app.state.keys.reload if config.server.api_key_file is not None else None
    lifecycle = Lifecycle(supervisor, client, app.state.admission, reload)
    freeze()
    try:
        with listener, asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            return runner.run(lifecycle.run(server, listener, lambda: _announce(config, app.state.service)))
    except EngineFailed as error:
        return _fail(str(error), CONFIGURATION_STATUS if error.is_configuration else FAILURE_STATUS)
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    finally:
        for ending in (app.state.tracing, app.state.recorder):
            if ending is not None:
                ending.close()


def _write_url(config: Config, path: str) -> None:
    """
    Raises:
        OSError: the file cannot be written; the message names it.
    """
    try:
        Path(path).expanduser().write_text(f"{_url(config)}\n", encoding="utf-8")
    except OSError as error:
        raise OSError(f"--url-file {path} cannot be written: {error.strerror}") from None


def _url(config: Config) -> str:
    """The server's URL for clients of this machine."""
    scheme = "http" if config.server.ssl_certfile is None else "https"
    if config.server.uds is not None:
        return f"{scheme}://localhost"  # clients need a host name; it is not resolved
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def _announce(config: Config, service: Service) -> None:
    url = _url(config)
    key = (
        " -H 'authorization: Bearer '$EAGLE_SERVER_API_KEY"
        if config.server.api_key or config.server.api_key_file
        else ""
    )
    curl, place = "curl -s", url
    if config.server.uds is not None:
        curl, place = f"curl -s --unix-socket {shlex.quote(config.server.uds)}", f"the Unix socket {config.server.uds}"
    ready, defaults = service.client.ready, service.sampling_defaults
    lines = [f"serving {config.served_model_name} on {place}", *described((ready and ready.resolved) or {})]
    if defaults:
        sampled = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        lines += [f"samples     {sampled}, where a request is silent (generation_config.json)"]
    if config.server.uds is None:  # browsers do not open it
        lines += [f"API         {url}/v1", f"playground  {url}/", f"docs        {url}/docs"]
    lines += [f"try         {curl} {url}/v1/completions -H 'content-type: application/json'{key} -d '{EXAMPLE_BODY}'"]
    logger.info("\n  ".join(lines))


def described(resolved: Mapping[str, Any]) -> list[str]:
    """Lines about model, drafter and KV of a resolved configuration (`Ready.resolved`). [] if it is empty."""
    parts = ("model", "device", "speculative", "cache", "scheduler")
    if not all(part in resolved for part in parts):
        return []
    model, device, speculative, cache, scheduler = (resolved[part] for part in parts)
    weights = " ".join(str(name) for name in (model["dtype"], model["quantization"]) if name)
    on = device["device"]
    if on == "cpu":
        on += f", threads: {device['cpu_threads']}, kernels: {device['cpu_kernels']}"
    else:
        graphs = "with" if device["cuda_graph_batch_sizes"] else "without"
        on += f", attention: {device['attention_backend']}, {graphs} CUDA graphs"
    saved = cache.get("state_checkpoints", 0)
    return [
        f"model       {model['architecture']}, {weights}, on {on}",
        f"drafts      {_drafts(speculative)}",
        f"KV          {cache['max_total_tokens']:,} tokens, {model['context_length']:,} at most for a request, "
        f"{scheduler['max_running_requests']} requests at once{f', {saved:,} checkpoints of states' if saved else ''}",
    ]


def _drafts(speculative: Mapping[str, Any]) -> str:
    if speculative["algorithm"] in (None, "NONE"):
        return "none: plain decoding"
    adaptive = "fixed trees" if speculative["adaptive"] == "off" else "trees follow cost and load"
    return (
        f"{speculative['algorithm']}, {speculative['num_steps']} steps, topk {speculative['eagle_topk']}, "
        f"{speculative['num_draft_tokens']} nodes at most; {adaptive}"
    )


def _fail(message: str, status: int) -> int:
    print(f"eagle_server: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
