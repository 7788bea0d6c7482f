"""A server whose model says what a script says.

A conversation is told by its first user message. Each of its requests gets the next text of the script that its grammar
allows.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec

from eagle_server.engine.grammars.grammars import Grammars
from eagle_server.plan import allows
from eagle_server.request import FinishReason, Grammar, Ready, Request
from tests.api.conftest import Server, kept_running, start_server
from tests.api.fake_engine import EOS, ID, FakeEngine, byte_tokenizer

TEMPLATE = Path(__file__).with_suffix(".jinja")  # as Qwen3's
FLAGS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
_FIRST = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


@cache
def _grammars() -> Grammars:
    return Grammars(byte_tokenizer, 256 + len(ID), [ID[EOS]])


def is_allowed(grammar: Grammar, reply: list[int]) -> bool:
    """Whether a reply, with its end, follows the grammar."""
    matcher = _grammars().compile(grammar).result().matcher(0, [])
    for count, token in enumerate(reply):
        mask = matcher.mask(reply[:count])
        if mask is None or not allows(mask, token):
            return False
    return True


class ScriptedEngine(FakeEngine):
    def __init__(self, script: list[str]) -> None:
        super().__init__()
        self._script, self._turns = [[*text.encode(), ID[EOS]] for text in script], Counter[str]()

    def ready(self) -> Ready:
        return msgspec.structs.replace(super().ready(), context_length=2**20, max_request_tokens=2**20)

    def add(self, request: Request) -> None:
        super().add(request)
        first = _FIRST.search(bytes(token for token in request.prompt_token_ids if token < 256).decode())
        turn = "" if first is None else first[1]
        grammar = request.sampling.grammar
        for reply in self._script[min(self._turns[turn], len(self._script) - 1) :]:
            self._turns[turn] += 1
            if grammar is None or is_allowed(grammar, reply):
                self.sequences[request.request_id].reply = reply
                return
        del self.sequences[request.request_id]
        self._end(request.request_id, FinishReason.ERROR, error="the grammar forbids the rest of the script")


def build() -> ScriptedEngine:
    return ScriptedEngine(json.loads(os.environ["SCRIPT"]))


@contextmanager
def serving(directory: Path, script: list[str]) -> Iterator[Server]:
    """A server in an empty directory."""
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    files = ("--model-path", str(directory), "--served-model-name", "m", "--chat-template", str(TEMPLATE))
    environ = {"SCRIPT": json.dumps(script)}
    with kept_running(start_server(directory / "log", *files, *FLAGS, module=__name__, environ=environ)) as server:
        yield server
