"""Compiles a grammar in a process of its own first, with limits of time, memory and stack.

A few lines of grammar may take hours or gigabytes to compile, or overflow the stack, and a thread cannot be stopped.
So the engine compiles only what this process has compiled before. Its vocabulary is the 256 bytes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

import llguidance
import msgspec

from eagle_server.engine.grammar_sources import llguidance_source, readable
from eagle_server.request import Grammar

SECONDS = 2  # of CPU time for one grammar, rounded up to the next whole second by the operating system
MEMORY = 64 << 20  # bytes that one compiled grammar may take
_ADDRESS_SPACE = 1 << 30
_STACK = 4 << 20  # bytes; half of what threads have by default, so that a grammar compiled here fits there
TOO_LARGE = f"it takes more than {SECONDS} seconds or too much memory to compile, or is nested too deeply"


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
    """The process. A grammar starts it again if one has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> tuple[str, int]:
        """What llguidance takes, and the size of the compiled grammar in bytes.

        Raises:
            ValueError: the grammar is wrong, or too large.
        """
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(grammar) + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            status, self._process = process.wait(), None
            if status >= 0:
                raise RuntimeError(f"the process that checks grammars ended with status {status}")
            raise ValueError(TOO_LARGE)  # ended by a limit, or by a stack overflow
        source, size, error = json.loads(answer)
        if error is not None:
            raise ValueError(error)
        return source, size

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process if it does not run."""
        if self._process is None:
            command = [sys.executable, "-m", "eagle_server.engine.grammar_check"]
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing)
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


class _Bytes:
    """A vocabulary as llguidance reads it: the bytes and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids: Sequence[int] = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _serve() -> None:
    wrapper = llguidance.TokenizerWrapper(_Bytes())
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=257, eos_token=256, slices=[])
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + SECONDS)
        answer = _checked(msgspec.json.decode(line, type=Grammar), tokenizer)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _checked(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> tuple[str, int, str | None]:
    before = _resident()
    try:
        source = llguidance_source(grammar)
    except RecursionError:
        return "", 0, TOO_LARGE
    except ValueError as error:
        return "", 0, readable(str(error), "")
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return "", 0, readable(matcher.get_error(), source)
    size = max(_resident() - before, len(source))
    return source, size, TOO_LARGE if size > MEMORY else None


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _limit(kind: int, value: int) -> None:
    """Set a soft limit, at most the hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    _limit(resource.RLIMIT_AS, _ADDRESS_SPACE)
    _limit(resource.RLIMIT_CORE, 0)
    threading.stack_size(_STACK)
    worker = threading.Thread(target=_serve)
    worker.start()
    worker.join()
