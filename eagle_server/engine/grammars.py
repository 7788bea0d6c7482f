"""Grammars that outputs must follow, by xgrammar: compiled beside the engine's loop, followed by one matcher a request.

A token's mask depends on the text before it alone, so a request's draws are the same with and without speculation.
xgrammar is imported beside the loop too, with `preload` or else the first grammar: it takes a second or more.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from eagle_server.plan import MASK_WORD, allows
from eagle_server.request import Grammar
from eagle_server.text.tool_formats import MARKERS
from eagle_server.text.tool_grammars import WHITESPACE

logger = logging.getLogger(__name__)

CACHED_BYTES = 256 << 20  # of compiled grammars that no request may be using any more
NO_TEXT = b"\xff"  # in no UTF-8, so in nothing that a grammar spells
DEEPEST = 100  # brackets; xgrammar's parsers recurse, and a stack that overflows ends the process
LONGEST = 256 << 10  # characters; its rules may refer to each other in a row, and there xgrammar recurses too
_STACK = 256 << 20  # bytes of address space for that; the longest row needs less than 64 MiB
_WORKERS = 2  # grammars compiled at a time
_THREADS = 4  # for each of them
_ESCAPES_AND_CLASSES = r"\\.|\[(?:\\.|[^\]\\])*\]"
_LITERALS = {
    "regex": re.compile(_ESCAPES_AND_CLASSES + r"|[\]{}]", re.DOTALL),  # of the brackets only round ones nest
    "ebnf": re.compile(r'"(?:\\.|[^"\\])*"|' + _ESCAPES_AND_CLASSES, re.DOTALL),
    "json_schema": re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL),
    "structural_tag": re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL),
}
_SOURCE_LINE = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # where in xgrammar's code an error arose


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens as text: `pieces` as its tokenizer.json spells them, empty for special tokens.

    But for markers of calls, which grammars may name by id: xgrammar accepts no empty token, so these have a byte that
    is in no text.
    """

    pieces: tuple[str | bytes, ...]
    spelling: str  # a name of xgrammar.VocabType

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, size: int) -> Vocabulary:
        """The first `size` tokens: a model may have fewer logits than its tokenizer entries, or more."""
        special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        pieces = [NO_TEXT if special.get(i) in MARKERS else "" for i in range(size)]
        for piece, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id < size and token_id not in special:
                pieces[token_id] = piece
        described = json.loads(tokenizer.to_str())
        parts = json.dumps([described["decoder"], described["pre_tokenizer"]])
        spellings = {'"ByteLevel"': "BYTE_LEVEL", '"ByteFallback"': "BYTE_FALLBACK"}
        return cls(tuple(pieces), next((name for part, name in spellings.items() if part in parts), "RAW"))


class RequestMatcher:
    """One request's way through its grammar; a `plan.GrammarMatcher`.

    It reads what was emitted from the scheduler's list, so what was drafted in vain or preempted changes nothing.
    """

    def __init__(self, matcher: Any, words: int, prompt_length: int) -> None:
        self.words = words
        self._matcher, self._length = matcher, prompt_length
        self._path: tuple[int, ...] = ()  # where the matcher stands, after the text
        self._known: dict[tuple[int, ...], NDArray[np.int32] | None] = {}
        self._lost = False

    def mask(self, text: Sequence[int], path: tuple[int, ...] = ()) -> NDArray[np.int32] | None:
        """See `plan.GrammarMatcher`."""
        if len(text) > self._length:
            self._advance(text)
        if path not in self._known:
            self._known[path] = self._find(text, path)
        return self._known[path]

    def _find(self, text: Sequence[int], path: tuple[int, ...]) -> NDArray[np.int32] | None:
        if self._lost:
            return None if path else np.zeros(self.words, dtype=np.int32)
        if path:
            above = self.mask(text, path[:-1])
            if above is None or not allows(above, path[-1]):
                return None
        self._go(path)
        if self._matcher.is_terminated():
            return None
        mask = np.empty(self.words, dtype=np.int32)
        self._matcher.fill_next_token_bitmask(mask[None], 0)
        return mask

    def _go(self, path: tuple[int, ...]) -> None:
        """Lead the matcher to a path that is allowed."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._matcher.rollback(len(self._path) - common)
        for token in path[common:]:
            self._matcher.accept_token(token)
        self._path = path

    def _advance(self, text: Sequence[int]) -> None:
        """Accept what was emitted since the last call. The masks allowed it; else the request cannot go on."""
        self._go(())
        for token in text[self._length :]:
            if not self._lost and not self._matcher.accept_token(token):
                logger.error("a grammar refuses token %d, which its mask allowed", token)
                self._lost = True
        self._length = len(text)
        self._known.clear()


@dataclass(frozen=True)
class Compiled:
    """A grammar for one vocabulary, ready to be followed."""

    grammar: Any  # xgrammar.CompiledGrammar
    words: int  # of a bitmask

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.grammar.memory_size_bytes)

    def follow(self, prompt_length: int, stop_ids: Iterable[int]) -> RequestMatcher:
        """A matcher for a request.

        Where the grammar is complete, and only there, the model's end of sequence may stand, and of the request's own
        stop_ids those that have no text. The others are part of what the grammar speaks of.
        """
        import xgrammar

        info = self.grammar.tokenizer_info
        stops = {*info.stop_token_ids, *set(info.special_token_ids).intersection(stop_ids)}
        matcher = xgrammar.GrammarMatcher(self.grammar, override_stop_tokens=sorted(stops))
        return RequestMatcher(matcher, self.words, prompt_length)


class Grammars:
    """Compiles grammars on threads of its own, and keeps the latest ones. `read` loads the tokenizer, once."""

    def __init__(self, read: Callable[[], tokenizers.Tokenizer], vocab_size: int, stops: Sequence[int]) -> None:
        """`stops`: the model's end-of-sequence tokens, at least one."""
        self._read, self._vocab_size, self._stops = read, vocab_size, tuple(stops)
        self._threads = _workers()
        self._compiler: Future[Any] | None = None
        self._known: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """The compiled grammar in time; a ValueError in one line if it cannot be followed."""
        self._forget()
        found = self._known.get(grammar)
        if found is None:
            found = self._known[grammar] = self._threads.submit(self._compile, grammar, self.preload())
        self._known.move_to_end(grammar)
        return found

    def preload(self) -> Future[Any]:
        """Begin to load what every grammar needs, unless that is done: xgrammar and the model's tokens."""
        if self._compiler is None:
            self._compiler = self._threads.submit(self._make_compiler)
        return self._compiler

    def _forget(self) -> None:
        """Drop what failed, to be tried anew, and of the rest the oldest until CACHED_BYTES hold it."""
        total = 0
        for grammar, future in reversed(list(self._known.items())):
            if not future.done():
                continue
            if future.exception() is None:
                total += future.result().size
            if future.exception() is not None or total > CACHED_BYTES:
                del self._known[grammar]

    def _make_compiler(self) -> Any:
        import xgrammar

        vocabulary = Vocabulary.of(self._read(), self._vocab_size)
        info = xgrammar.TokenizerInfo(
            list[Any](vocabulary.pieces),
            getattr(xgrammar.VocabType, vocabulary.spelling),
            vocab_size=self._vocab_size,
            stop_token_ids=list(self._stops),
        )
        return xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_enabled=False)

    def _compile(self, grammar: Grammar, compiler: Future[Any]) -> Compiled:
        try:
            return Compiled(_compiled(compiler.result(), grammar), -(-self._vocab_size // MASK_WORD))
        except Exception as error:  # xgrammar raises RuntimeError for whatever is wrong with a grammar
            reason = " ".join(_SOURCE_LINE.sub("", str(error)).split()) or type(error).__name__
            raise ValueError(f"grammar: this {grammar.kind} cannot be followed: {reason}") from error


def _workers() -> ThreadPoolExecutor:
    """Threads with deep stacks, whose size Python takes when they start."""
    before, started = threading.stack_size(_STACK), threading.Barrier(_WORKERS)
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
    for each in [pool.submit(started.wait) for _ in range(_WORKERS)]:
        each.result()
    threading.stack_size(before)
    return pool


def _compiled(compiler: Any, grammar: Grammar) -> Any:
    """An xgrammar.CompiledGrammar."""
    if len(grammar.source) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} characters")
    if any(_depth(_LITERALS[kind].sub("", source)) > DEEPEST for kind, source in _parts(grammar)):
        raise ValueError(f"it is nested deeper than {DEEPEST} brackets")
    if grammar.kind == "json_object":
        return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=WHITESPACE)
    if grammar.kind == "json_schema":
        return compiler.compile_json_schema(grammar.source, max_whitespace_cnt=WHITESPACE)
    if grammar.kind == "structural_tag":
        return compiler.compile_structural_tag(grammar.source)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.source)
    if grammar.kind == "choice":
        texts = " | ".join(json.dumps(text) for text in json.loads(grammar.source))
        return compiler.compile_grammar(f"root ::= {texts}")
    return compiler.compile_grammar(grammar.source)


def _parts(grammar: Grammar) -> Iterator[tuple[str, str]]:
    """The texts of a grammar that have brackets, and what they are, the outermost first: a schema has patterns."""
    if grammar.kind in _LITERALS:
        yield grammar.kind, grammar.source
    if grammar.kind in {"json_schema", "structural_tag"}:
        values = [json.loads(grammar.source)]
        while values:
            value = values.pop()
            if isinstance(value, dict):
                pattern, patterns = value.get("pattern"), value.get("patternProperties")
                found = [pattern, *(patterns if isinstance(patterns, dict) else ())]
                yield from (("regex", each) for each in found if isinstance(each, str))
                values.extend(value.values())
            elif isinstance(value, list):
                values.extend(value)


def _depth(source: str) -> int:
    """How deep brackets are nested."""
    deepest = depth = 0
    for character in source:
        depth = max(depth + (character in "([{") - (character in ")]}"), 0)
        deepest = max(deepest, depth)
    return deepest
