"""Compiles a grammar in a process of its own first, with limits of time, memory and stack.

A few lines of grammar may take hours or gigabytes to compile, or overflow the stack, and a thread cannot be stopped.
So the engine compiles only what such a process has compiled before. A waiting process forks for each grammar.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

import llguidance
import msgspec

from eagle_server.engine.grammars.sources import llguidance_source, param_of, readable
from eagle_server.request import Grammar, GrammarError

SECONDS = 1  # CPU time for one grammar
MEMORY = 64 << 20  # bytes that one compiled grammar may take
_ADDRESS_SPACE = 1 << 30
_STACK = 4 << 20  # bytes; half of what threads have by default, so that a grammar compiled here fits there
_NICE = 10
_BYTES = 256
TOO_LARGE = f"it takes more than {SECONDS} second or too much memory to compile, or is nested too deeply"


def limits() -> llguidance.LLParserLimits:
    """Limits of llguidance for each step of a matcher. About 15 ms of work; most steps take microseconds."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


class GrammarCheck:
    """The waiting process. It starts early or for the first grammar, and again after it was killed."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process if it does not run."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            command = [sys.executable, "-m", "eagle_server.engine.grammars.check", str(self._vocab_size)]
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing)
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def check(self, grammar: Grammar) -> str:
        """The grammar in the form that llguidance takes.

        Raises:
            GrammarError: the grammar is wrong, or too large.
            OSError: the process does not answer.
        """
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(grammar) + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            self.close()
            raise OSError("the process that checks grammars has ended")
        source, param, reason = json.loads(answer)
        if reason:
            raise GrammarError(param, reason)
        return str(source)

    def close(self) -> None:
        """End the process."""
        self._process = None
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


class _Bytes:
    """A vocabulary as llguidance reads it: the bytes, an end, and ids without text up to the model's size."""

    bos_token_id = None
    eos_token_id = _BYTES
    special_token_ids: Sequence[int] = (_BYTES,)

    def __init__(self, size: int) -> None:
        self.tokens: Sequence[bytes] = [bytes([byte]) for byte in range(_BYTES)] + [b""] * (size - _BYTES)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _serve(size: int) -> None:
    wrapper = llguidance.TokenizerWrapper(_Bytes(size))
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=_BYTES, slices=[])
    for line in sys.stdin.buffer:
        grammar = msgspec.json.decode(line, type=Grammar)
        answer = _fork(grammar, tokenizer)
        if not answer.endswith(b"\n"):
            answer = _line("", param_of(grammar), TOO_LARGE)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _fork(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> bytes:
    """The answer of a fork: a line, or less if a limit or a stack overflow has ended it."""
    reading, writing = os.pipe()
    if process := os.fork():
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(process, 0)
        return answer
    _limit(resource.RLIMIT_CPU, SECONDS)
    threading.stack_size(_STACK)
    worker = threading.Thread(target=_answer, args=(grammar, tokenizer, writing))
    worker.start()
    worker.join()
    os._exit(0)


def _answer(grammar: Grammar, tokenizer: llguidance.LLTokenizer, writing: int) -> None:
    try:
        answer = _line(_checked(grammar, tokenizer))
    except GrammarError as error:
        answer = _line("", error.param, error.reason)
    except (RecursionError, MemoryError):
        answer = _line("", param_of(grammar), TOO_LARGE)
    except Exception as error:
        answer = _line("", param_of(grammar), readable(str(error), ""))
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(answer)


def _line(source: str, param: str = "", reason: str = "") -> bytes:
    """The answer: the grammar as llguidance takes it, or a parameter and what is wrong with it."""
    return json.dumps((source, param, reason)).encode() + b"\n"


def _checked(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> str:
    before = _resident()
    source = llguidance_source(grammar)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        for part in _parts(grammar):
            _checked(part, tokenizer)
        error = matcher.get_error()
        raise GrammarError(param_of(grammar, error, source), readable(error, source))
    if _resident() - before > MEMORY:
        raise GrammarError(param_of(grammar), TOO_LARGE)
    return source


def _parts(grammar: Grammar) -> Sequence[Grammar]:
    """The answer's grammar and that of the calls in its place. Whichever is wrong alone says whose error it is."""
    if not grammar.calls:
        return ()
    replace = msgspec.structs.replace
    calls = replace(grammar, kind="calls", source=grammar.calls, calls="", thinking="", param="tools")
    return replace(grammar, calls="", thinking=""), calls


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _limit(kind: int, value: int) -> None:
    """Set a soft limit, at most the hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    os.nice(_NICE)
    _limit(resource.RLIMIT_AS, _ADDRESS_SPACE)
    _limit(resource.RLIMIT_CORE, 0)
    _serve(max(int(sys.argv[1]), _BYTES + 1))
