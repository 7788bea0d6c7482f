"""`eagle-server bench hops`: how much of eagle_server one cycle and one answer go through.

A newcomer who follows a request with a debugger opens these files. Counted are files of the package that run a line,
functions with a name, and objects of the package's own classes that Python code initializes (not those of msgspec). The
demo answers with default options. A cycle is the median over one answer's cycles without prompts, not the first answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import httpx
import msgspec
import zmq
import zmq.asyncio

import eagle_server
from eagle_server.api.app import create_app
from eagle_server.api.server import HttpServer
from eagle_server.client.client import EngineClient
from eagle_server.client.supervisor import Supervisor
from eagle_server.config.sections import Config
from eagle_server.config.sources import from_options
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.engine.engine import Engine
from eagle_server.engine.process import run_engine
from eagle_server.llm import LLM
from eagle_server.request import Abort, Inbound, Outbound, Request, SamplingParams
from eagle_server.text.chat_template_files import load_chat_template
from eagle_server.text.tokenizer import load_tokenizer
from eagle_tools.bench.rich_output import Console, Table

PROMPT, TOKENS = "def fibonacci(n):\n", 16
BEFORE = 900  # tokens of an answer before cycles are counted: enough for the draft to be judged
_PACKAGE = f"{Path(eagle_server.__file__).parent}/"
_GENERATED = "<string>"  # the file of a dataclass's __init__
_PLAIN = {"speculative_algorithm": "NONE"}
_STOP = "stop"  # the request after which the engine's thread ends


@dataclass(frozen=True)
class Hops:
    """What ran. `objects`: how many of each own class were initialized."""

    codes: frozenset[CodeType]
    objects: Counter[str]

    @property
    def files(self) -> list[str]:
        """Of the package, by path in it."""
        return sorted({code.co_filename.removeprefix(_PACKAGE) for code in self.codes})

    @property
    def functions(self) -> int:
        """Those with a name: lambdas and comprehensions belong to the functions around them."""
        return sum(not code.co_name.startswith("<") for code in self.codes)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Files, functions, own classes, objects."""
        return len(self.files), self.functions, len(self.objects), self.objects.total()


class CallRecorder:
    """A profile function. It counts in every thread that has it, while `recording`."""

    def __init__(self) -> None:
        self._codes, self._objects, self._is_on = set[CodeType](), Counter[str](), False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """See `sys.setprofile`."""
        if not self._is_on or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            self._codes.add(code)
        elif code.co_filename != _GENERATED:
            return
        if code.co_name == "__init__" and code.co_argcount:
            made = frame.f_locals[code.co_varnames[0]]
            above = frame.f_back
            is_base = above is not None and above.f_code.co_name == "__init__" and made in _arguments(above)
            if type(made).__module__.startswith("eagle_server.") and not is_base:
                self._objects[type(made).__qualname__] += 1

    @contextmanager
    def recording(self, into: list[Hops]) -> Iterator[None]:
        """Append what runs in this block."""
        self._codes, self._objects, self._is_on = set(), Counter(), True
        try:
            yield
        finally:
            self._is_on = False
            into.append(Hops(frozenset(self._codes), self._objects))


def _arguments(frame: FrameType) -> Iterator[Any]:
    """The object whose method the frame runs, for `in` to compare by identity first."""
    names = frame.f_code.co_varnames[: min(1, frame.f_code.co_argcount)]
    return iter([frame.f_locals[name] for name in names if name in frame.f_locals])


@contextmanager
def profiled(recorder: CallRecorder) -> Iterator[None]:
    """Let the recorder see this thread's calls."""
    sys.setprofile(recorder)
    try:
        yield
    finally:
        sys.setprofile(None)


def cycles(**options: Any) -> list[Hops]:
    """Each cycle of an answer without prompts; with drafts unless the options forbid them.

    The engine has answered before: at first it also judges the draft, and learns more often.
    """
    config = from_options(options)
    engine: Engine = build_engine(config, progress=False)
    tokens = load_tokenizer(config.target_path).encode(PROMPT)
    recorder, counted = CallRecorder(), list[Hops]()
    for number, count in enumerate((BEFORE, 8 * TOKENS)):
        sampling = SamplingParams(max_tokens=count, seed=0, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=tokens, sampling=sampling))
        while engine.has_work():
            seen = list[Hops]()
            with profiled(recorder), recorder.recording(seen):
                engine.step()
            cycle = engine.take_cycle()
            engine.catch_up()
            if number and cycle is not None and not cycle.computed and bool(cycle.steps) == config.speculates:
                counted += seen
    return counted


def generated(**options: Any) -> Hops:
    """An answer of `LLM.generate`."""
    llm, recorder, seen = LLM(progress=False, **options), CallRecorder(), list[Hops]()
    llm.generate(PROMPT, max_tokens=TOKENS, temperature=0.0, use_tqdm=False)
    with profiled(recorder), recorder.recording(seen):
        llm.generate(f"# {PROMPT}", max_tokens=TOKENS, temperature=0.0, use_tqdm=False)
    return seen[0]


def served(path: str, body: Mapping[str, Any], **options: Any) -> Hops:
    """An answer over HTTP. Server and engine run on threads of this process, with the sockets between them."""
    return asyncio.run(_served(path, body, from_options(options)))


async def _served(path: str, body: Mapping[str, Any], config: Config) -> Hops:
    recorder, seen = CallRecorder(), list[Hops]()
    tokenizer = load_tokenizer(config.target_path)
    client = EngineClient()
    app = create_app(config, client, tokenizer, load_chat_template(config.target_path, tokenizer, None))
    server = HttpServer(app)
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as listener:
        engine = _EngineThread(config, Path(directory), recorder)
        receiving = asyncio.create_task(Supervisor(_no_process, client)._pump(engine))  # type: ignore[arg-type]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await client.until_available()
        post = partial(_post, f"http://127.0.0.1:{listener.getsockname()[1]}{path}", body)
        await asyncio.to_thread(post)  # the first answer loads modules
        with profiled(recorder), recorder.recording(seen):
            await asyncio.to_thread(post)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await engine.stop()
        server.should_exit = True
        await serving
    return seen[0]


def _post(url: str, body: Mapping[str, Any]) -> None:
    httpx.post(url, json=body, timeout=None).raise_for_status()


def _no_process() -> NoReturn:
    raise AssertionError("the engine runs on a thread")


class _EngineThread:
    """Has the methods of `EngineProcess` that the supervisor needs to talk to an engine."""

    def __init__(self, config: Config, directory: Path, recorder: CallRecorder) -> None:
        self._addresses = tuple(f"ipc://{directory / name}" for name in ("inbound", "outbound"))
        self._config, self._recorder = config, recorder
        self._context, self.pid = zmq.Context(), os.getpid()
        self._sender, self._receiver = self._context.socket(zmq.PUSH), zmq.asyncio.Socket(self._context, zmq.PULL)
        self._receiver.bind(self._addresses[1])
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], Outbound] = msgspec.msgpack.Decoder(Outbound).decode
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with profiled(self._recorder), suppress(_Stop):
            run_engine(lambda: _Stopping(build_engine(self._config, progress=False)), *self._addresses)

    def connect(self) -> None:
        """See `EngineProcess`; the others too."""
        self._sender.connect(self._addresses[0])

    def send(self, message: Inbound) -> None:
        self._sender.send(self._encode(message), zmq.NOBLOCK)

    async def receive(self) -> Outbound:
        return self._decode(await self._receiver.recv())

    async def stop(self) -> None:
        """End the thread."""
        self.send(Abort(request_id=_STOP))
        await asyncio.to_thread(self._thread.join)
        self._sender.close(linger=0)
        self._receiver.close(linger=0)
        self._context.term()


class _Stop(Exception):
    """Ends an engine's loop."""


class _Stopping:
    """An engine whose loop ends when the request _STOP is aborted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def abort(self, request_id: str) -> None:
        if request_id == _STOP:
            raise _Stop
        self._engine.abort(request_id)


COMPLETION = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
CHAT = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "stream": True,
}


def median(counted: Sequence[Hops]) -> Hops:
    """The one with the median number of files."""
    return sorted(counted, key=lambda hops: hops.numbers)[len(counted) // 2]


# Each takes options; plain cycles have their own.
WALKS: dict[str, Callable[..., Hops]] = {
    "a cycle that drafts": lambda **options: median(cycles(**options)),
    "a plain cycle": lambda **_: median(cycles(**_PLAIN)),
    f"LLM.generate, {TOKENS} tokens": generated,
    f"/v1/completions, {TOKENS} tokens": partial(served, "/v1/completions", COMPLETION),
    f"/v1/chat/completions, streamed, {TOKENS} tokens": partial(served, "/v1/chat/completions", CHAT),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle-server bench hops",
        description="Counts the files, functions and objects of eagle_server that a cycle and an answer go through.",
        epilog="example: eagle-server bench hops --files",
    )
    parser.add_argument("--files", action="store_true", help="also list the files, and the classes with their objects")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the table; returns 0."""
    arguments, console = _parser().parse_args(argv), Console()
    table = Table("", "files", "functions", "own classes", "objects")
    for column in table.columns[1:]:
        column.justify = "right"
    walks = {name: walk() for name, walk in WALKS.items()}
    for name, hops in walks.items():
        table.add_row(name, *map(str, hops.numbers))
    console.print(table)
    for name, hops in walks.items() if arguments.files else ():
        objects = ", ".join(f"{cls} {count}" for cls, count in hops.objects.most_common())
        console.print(f"\n{name}:", *hops.files, f"objects: {objects}", sep="\n  ", soft_wrap=True)
    return 0
