"""Grammars for outputs, with llguidance. Threads beside the engine's loop check them; each request has a matcher.

A token mask depends only on the text before it, so a request's draws are the same with and without speculation.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import LifoQueue

import llguidance
import tokenizers

from eagle_server.engine.grammars.check import GrammarCheck, limits
from eagle_server.engine.grammars.matcher import LLGuidanceMatcher, MaskBudget
from eagle_server.request import Grammar, GrammarError
from eagle_server.text.token_spelling import byte_alphabet
from eagle_server.turns import Lane, yield_cores

CACHED = 256  # grammars
_CHECKS = 3  # processes, so that one slow grammar does not delay the others
_MASK_THREADS = 2  # threads that compile grammars and compute slow masks, after everything else


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
    """The function that gives the bytes of a piece in tokenizer.json."""
    described = json.loads(tokenizer.to_str())
    parts = json.dumps([described["decoder"], described["pre_tokenizer"], described["normalizer"]], ensure_ascii=False)
    if '"ByteLevel"' in parts:
        bytes_of = byte_alphabet()
        return lambda piece: (
            bytes(map(bytes_of.__getitem__, piece)) if bytes_of.keys() >= set(piece) else piece.encode()
        )
    space = "▁" if "▁" in parts else " "
    named = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if '"ByteFallback"' in parts else {}
    return lambda piece: named.get(piece) or piece.replace(space, " ").encode()


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar that compiles, for one vocabulary."""

    source: str  # as llguidance takes it
    tokenizer: llguidance.LLTokenizer
    vocabulary: Vocabulary
    ends: tuple[int, ...]  # the model's end-of-sequence tokens
    threads: ThreadPoolExecutor
    budget: MaskBudget

    def make(self) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self.tokenizer, self.source, log_level=0, limits=limits())

    def matcher(self, prompt_length: int, stop_ids: Iterable[int]) -> LLGuidanceMatcher:
        """A matcher for one request.

        Only a complete output may end. The end tokens are the model's end of sequence and the request's stop_ids that
        have no text. Other stop ids are ordinary tokens of the grammar.
        """
        extra = set(self.vocabulary.special_token_ids).intersection(stop_ids).difference(self.ends)
        ends, size = (*self.ends, *sorted(extra)), len(self.vocabulary.tokens)
        return LLGuidanceMatcher(self.make, size, prompt_length, ends, self.threads.submit, self.budget)


def _may_succeed_later(compiled: Future[CompiledGrammar]) -> bool:
    """Whether something other than the grammar itself was wrong."""
    return compiled.done() and not isinstance(compiled.exception(), GrammarError | None)


class Grammars:
    """Checks grammars on threads, and caches the latest ones. `read` loads the tokenizer and runs once."""

    def __init__(
        self,
        read: Callable[[], tokenizers.Tokenizer],
        vocab_size: int,
        ends: Sequence[int],
        budget: MaskBudget | None = None,
    ) -> None:
        """`ends`: the model's end-of-sequence tokens, at least one."""
        self._read, self._vocab_size, self._ends = read, vocab_size, tuple(ends)
        self._checking = Lane(_CHECKS, "grammar")
        self._checks = LifoQueue[GrammarCheck]()  # the one that runs already comes first
        for _ in range(_CHECKS):
            self._checks.put(GrammarCheck(vocab_size))
        self._masking = ThreadPoolExecutor(_MASK_THREADS, "mask", yield_cores)
        self.budget = budget or MaskBudget()
        self._tokens: Future[tuple[llguidance.LLTokenizer, Vocabulary]] | None = None
        self._cache: OrderedDict[tuple[Grammar, str | None], Future[CompiledGrammar]] = OrderedDict()

    def compile(self, grammar: Grammar, salt: str | None = None, client: str = "") -> Future[CompiledGrammar]:
        """A future of the compiled grammar. Its exception is a GrammarError if the grammar is invalid.

        Clients take turns. A grammar that two of them wait for is compiled when it is the first one's turn.
        Requests with different salts share no grammar: the time would reveal which grammars others use.
        """
        key = (grammar, salt)
        future = self._cache.get(key)
        if future is None or _may_succeed_later(future):
            future = self._cache[key] = self._checking.submit(client, partial(self._compile, grammar, self.preload()))
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return future

    def cancel(self, grammar: Grammar, salt: str | None = None) -> None:
        """Nobody waits for this grammar any more: do not compile it if compiling has not begun."""
        if (future := self._cache.get((grammar, salt))) is not None and future.cancel():
            del self._cache[grammar, salt]

    def preload(self) -> Future[tuple[llguidance.LLTokenizer, Vocabulary]]:
        """Start to read the model's tokens, once, and a process that checks grammars."""
        if self._tokens is None:
            self._tokens = self._checking.submit("", self._read_tokens)
        return self._tokens

    def _read_tokens(self) -> tuple[llguidance.LLTokenizer, Vocabulary]:
        with self._borrowed_check() as check:
            check.start()
        vocabulary = Vocabulary.of(self._read(), self._vocab_size, self._ends[0])
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        return llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=list(self._ends)), vocabulary

    def _compile(self, grammar: Grammar, tokens: Future[tuple[llguidance.LLTokenizer, Vocabulary]]) -> CompiledGrammar:
        with self._borrowed_check() as check:
            try:
                source = check.check(grammar)
            except OSError:  # something has killed it
                source = check.check(grammar)
        return CompiledGrammar(source, *tokens.result(), self._ends, self._masking, self.budget)

    @contextmanager
    def _borrowed_check(self) -> Iterator[GrammarCheck]:
        check = self._checks.get()
        try:
            yield check
        finally:
            self._checks.put(check)
