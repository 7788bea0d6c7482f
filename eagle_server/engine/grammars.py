"""Grammars for outputs, with llguidance. A thread beside the engine's loop compiles them; each request has a matcher.

A token mask depends only on the text before it, so a request's draws are the same with and without speculation.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import llguidance
import tokenizers

from eagle_server.engine.grammar_check import GrammarCheck, limits
from eagle_server.engine.grammar_matcher import LLGuidanceMatcher
from eagle_server.engine.grammar_sources import readable
from eagle_server.request import Grammar

CACHED_BYTES = 256 << 20  # size limit of the cache of compiled grammars
_MASK_THREADS = 2  # for slow masks


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens as bytes, as llguidance reads them. Special tokens are never part of a text."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], Sequence[int]]
    bos_token_id: None = None

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, size: int, end: int) -> Vocabulary:
        """The first `size` tokens. A model may have fewer or more logits than its tokenizer has entries."""
        spelled = _spelling(tokenizer)
        tokens, special = [b""] * size, []
        for piece, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
            if token_id < size:
                tokens[token_id] = spelled(piece)
        for token_id, added in tokenizer.get_added_tokens_decoder().items():
            if token_id < size:
                tokens[token_id] = added.content.encode()
                special += [token_id] * added.special
        return cls(tokens, special, end, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)

    def __call__(self, text: str) -> Sequence[int]:
        return self.encode(text)


def _spelling(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How the pieces of tokenizer.json spell bytes."""
    described = json.loads(tokenizer.to_str())
    parts = json.dumps([described["decoder"], described["pre_tokenizer"], described["normalizer"]], ensure_ascii=False)
    if '"ByteLevel"' in parts:
        bytes_of = _byte_level()
        return lambda piece: (
            bytes(map(bytes_of.__getitem__, piece)) if bytes_of.keys() >= set(piece) else piece.encode()
        )
    space = "▁" if "▁" in parts else " "
    named = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if '"ByteFallback"' in parts else {}
    return lambda piece: named.get(piece) or piece.replace(space, " ").encode()


def _byte_level() -> dict[str, int]:
    """The byte of each character of byte-level BPE: printable bytes are themselves, the others follow at 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar compiled for one vocabulary. `size` is its memory in bytes."""

    template: llguidance.LLMatcher
    size: int
    vocabulary: Vocabulary
    ends: tuple[int, ...]  # the model's end-of-sequence tokens
    threads: ThreadPoolExecutor

    def matcher(self, prompt_length: int, stop_ids: Iterable[int]) -> LLGuidanceMatcher:
        """A matcher for one request.

        Only a complete output may end. The end tokens are the model's end of sequence and those of the request's
        stop_ids that have no text. Other stop ids are ordinary tokens of the grammar.
        """
        own = set(self.vocabulary.special_token_ids).intersection(stop_ids).difference(self.ends)
        ends, size = (*self.ends, *sorted(own)), len(self.vocabulary.tokens)
        return LLGuidanceMatcher(self.template, size, prompt_length, ends, self.threads.submit)


class Grammars:
    """Compiles grammars on a thread, and caches the latest ones. `read` loads the tokenizer and runs once."""

    def __init__(self, read: Callable[[], tokenizers.Tokenizer], vocab_size: int, ends: Sequence[int]) -> None:
        """`ends`: the model's end-of-sequence tokens, at least one."""
        self._read, self._vocab_size, self._ends = read, vocab_size, tuple(ends)
        self._check = GrammarCheck()
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._masking = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="mask")
        self._tokens: Future[tuple[llguidance.LLTokenizer, Vocabulary]] | None = None
        self._cache: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """A future of the compiled grammar. Its exception is a ValueError in one line if the grammar is invalid."""
        self._evict()
        found = self._cache.get(grammar)
        if found is None:
            found = self._cache[grammar] = self._compiling.submit(self._compile, grammar, self.preload())
        self._cache.move_to_end(grammar)
        return found

    def preload(self) -> Future[tuple[llguidance.LLTokenizer, Vocabulary]]:
        """Start to read the model's tokens, once, and the process that checks grammars."""
        if self._tokens is None:
            self._tokens = self._compiling.submit(self._read_tokens)
        return self._tokens

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

    def _read_tokens(self) -> tuple[llguidance.LLTokenizer, Vocabulary]:
        self._check.start()
        vocabulary = Vocabulary.of(self._read(), self._vocab_size, self._ends[0])
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        return llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=list(self._ends)), vocabulary

    def _compile(self, grammar: Grammar, tokens: Future[tuple[llguidance.LLTokenizer, Vocabulary]]) -> CompiledGrammar:
        tokenizer, vocabulary = tokens.result()
        try:
            source, size = self._check.check(grammar)
            template = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits())
            if not template.is_error():
                template.compute_bitmask()  # what it learns is in every copy
            if template.is_error():
                raise ValueError(readable(template.get_error(), source))
        except ValueError as error:
            raise ValueError(f"grammar: this {grammar.kind} cannot be followed: {error}") from error
        return CompiledGrammar(template, size, vocabulary, self._ends, self._masking)
