"""Grammars for outputs, with xgrammar. Threads beside the engine's loop compile them; each request has its own matcher.

A token mask depends only on the text before it, so a request's draws are the same with and without speculation. A
thread also imports xgrammar, in `preload` or for the first grammar, because the import takes a second or more.
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

CACHED_BYTES = 256 << 20  # size limit of the cache of compiled grammars
NO_TEXT = b"\xff"  # never occurs in UTF-8, so no grammar can match it as text
DEEPEST = 100  # nested brackets: xgrammar's parsers recurse, and a stack overflow ends the process
LONGEST = 256 << 10  # characters: xgrammar also recurses along chains of rules that refer to each other
_STACK = 256 << 20  # bytes of address space for this recursion; the longest chain needs less than 64 MiB
_WORKERS = 2  # grammars compiled at a time
_THREADS = 4  # xgrammar's threads for each of them
_ESCAPES_AND_CLASSES = r"\\.|\[(?:\\.|[^\]\\])*\]"
_LITERALS = {
    "regex": re.compile(_ESCAPES_AND_CLASSES + r"|[\]{}]", re.DOTALL),  # in a regex only round brackets nest
    "ebnf": re.compile(r'"(?:\\.|[^"\\])*"|' + _ESCAPES_AND_CLASSES, re.DOTALL),
    "json_schema": re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL),
    "structural_tag": re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL),
}
_SOURCE_LINE = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # the place in xgrammar's code that raised an error


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens as text: `pieces` as tokenizer.json spells them, empty for special tokens.

    Special tokens that mark tool calls have the piece NO_TEXT instead. Grammars name them by id, and xgrammar accepts
    no token with an empty piece.
    """

    pieces: tuple[str | bytes, ...]
    spelling: str  # a name of xgrammar.VocabType

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, size: int) -> Vocabulary:
        """The first `size` tokens. A model may have fewer or more logits than its tokenizer has entries."""
        special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        pieces = [NO_TEXT if special.get(i) in MARKERS else "" for i in range(size)]
        for piece, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id < size and token_id not in special:
                pieces[token_id] = piece
        described = json.loads(tokenizer.to_str())
        parts = json.dumps([described["decoder"], described["pre_tokenizer"]])
        spellings = {'"ByteLevel"': "BYTE_LEVEL", '"ByteFallback"': "BYTE_FALLBACK"}
        return cls(tuple(pieces), next((name for part, name in spellings.items() if part in parts), "RAW"))


class XGrammarMatcher:
    """A `plan.GrammarMatcher` for one request.

    It reads the accepted tokens from the scheduler's list. So rejected drafts and preemptions do not change its state.
    """

    def __init__(self, matcher: Any, words: int, prompt_length: int) -> None:
        self.words = words
        self._matcher, self._length = matcher, prompt_length
        self._path: tuple[int, ...] = ()  # drafted tokens that the matcher has accepted after the text
        self._masks: dict[tuple[int, ...], NDArray[np.int32] | None] = {}
        self._failed = False

    def mask(self, text: Sequence[int], path: tuple[int, ...] = ()) -> NDArray[np.int32] | None:
        """See `plan.GrammarMatcher`."""
        if len(text) > self._length:
            self._advance(text)
        if path not in self._masks:
            self._masks[path] = self._compute(text, path)
        return self._masks[path]

    def _compute(self, text: Sequence[int], path: tuple[int, ...]) -> NDArray[np.int32] | None:
        if self._failed:
            return None if path else np.zeros(self.words, dtype=np.int32)
        if path:
            parent = self.mask(text, path[:-1])
            if parent is None or not allows(parent, path[-1]):
                return None
        self._move_to(path)
        if self._matcher.is_terminated():
            return None
        mask = np.empty(self.words, dtype=np.int32)
        self._matcher.fill_next_token_bitmask(mask[None], 0)
        return mask

    def _move_to(self, path: tuple[int, ...]) -> None:
        """Roll back to the common prefix with the current path, then accept the rest of an allowed `path`."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._matcher.rollback(len(self._path) - common)
        for token in path[common:]:
            self._matcher.accept_token(token)
        self._path = path

    def _advance(self, text: Sequence[int]) -> None:
        """Accept the output tokens since the last call. If one is not allowed, all later masks are empty."""
        self._move_to(())
        for token in text[self._length :]:
            if not self._failed and not self._matcher.accept_token(token):
                logger.error("a grammar refuses token %d, which its mask allowed", token)
                self._failed = True
        self._length = len(text)
        self._masks.clear()


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar compiled for one vocabulary."""

    grammar: Any  # xgrammar.CompiledGrammar
    words: int  # int32 words of a token mask

    @property
    def size(self) -> int:
        """Memory in bytes."""
        return int(self.grammar.memory_size_bytes)

    def matcher(self, prompt_length: int, stop_ids: Iterable[int]) -> XGrammarMatcher:
        """A matcher for one request.

        Only a complete output may end. The end tokens are the model's end of sequence and those of the request's
        stop_ids that have no text. Other stop ids are ordinary tokens of the grammar.
        """
        import xgrammar

        info = self.grammar.tokenizer_info
        stops = {*info.stop_token_ids, *set(info.special_token_ids).intersection(stop_ids)}
        matcher = xgrammar.GrammarMatcher(self.grammar, override_stop_tokens=sorted(stops))
        return XGrammarMatcher(matcher, self.words, prompt_length)


class Grammars:
    """Compiles grammars on its own threads, and caches the latest ones. `read` loads the tokenizer and runs once."""

    def __init__(self, read: Callable[[], tokenizers.Tokenizer], vocab_size: int, stops: Sequence[int]) -> None:
        """`stops`: the model's end-of-sequence tokens, at least one."""
        self._read, self._vocab_size, self._stops = read, vocab_size, tuple(stops)
        self._threads = _workers()
        self._compiler: Future[Any] | None = None
        self._cache: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """A future of the compiled grammar. Its exception is a ValueError in one line if the grammar is invalid."""
        self._evict()
        found = self._cache.get(grammar)
        if found is None:
            found = self._cache[grammar] = self._threads.submit(self._compile, grammar, self.preload())
        self._cache.move_to_end(grammar)
        return found

    def preload(self) -> Future[Any]:
        """Start to load what every grammar needs, once: xgrammar and the model's tokens."""
        if self._compiler is None:
            self._compiler = self._threads.submit(self._make_compiler)
        return self._compiler

    def _evict(self) -> None:
        """Drop failed grammars, so that they are tried again, and the oldest ones beyond CACHED_BYTES."""
        total = 0
        for grammar, future in reversed(list(self._cache.items())):
            if not future.done():
                continue
            if future.exception() is None:
                total += future.result().size
            if future.exception() is not None or total > CACHED_BYTES:
                del self._cache[grammar]

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

    def _compile(self, grammar: Grammar, compiler: Future[Any]) -> CompiledGrammar:
        try:
            return CompiledGrammar(_compiled(compiler.result(), grammar), -(-self._vocab_size // MASK_WORD))
        except Exception as error:  # xgrammar raises RuntimeError for any error in a grammar
            reason = " ".join(_SOURCE_LINE.sub("", str(error)).split()) or type(error).__name__
            raise ValueError(f"grammar: this {grammar.kind} cannot be followed: {reason}") from error


def _workers() -> ThreadPoolExecutor:
    """Threads with deep stacks. Python reads the stack size when a thread starts, so all of them start here."""
    before, started = threading.stack_size(_STACK), threading.Barrier(_WORKERS)
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
    for each in [pool.submit(started.wait) for _ in range(_WORKERS)]:
        each.result()
    threading.stack_size(before)
    return pool


def _compiled(compiler: Any, grammar: Grammar) -> Any:
    """Compile to an xgrammar.CompiledGrammar."""
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
    """(kind, source) of each part of a grammar that can nest brackets: the grammar, then a schema's regex patterns."""
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
    """How deeply brackets are nested."""
    deepest = depth = 0
    for character in source:
        depth = max(depth + (character in "([{") - (character in ")]}"), 0)
        deepest = max(deepest, depth)
    return deepest
