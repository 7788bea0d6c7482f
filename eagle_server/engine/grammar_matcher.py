"""The token masks of one request's grammar, with limits for their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import llguidance
import numpy as np
from numpy.typing import NDArray

from eagle_server.engine.grammar_sources import readable
from eagle_server.plan import MASK_WORD, allows

# Seconds of CPU time, so that a busy machine does not look like a slow grammar.
SLOW = 0.001  # a root's mask that takes longer is computed on a thread from then on
PER_CYCLE = 0.002  # for all drafted tokens of a cycle; those beyond it are not verified
LONGEST = 0.1  # for one mask; a longer one ends the request
TOO_SLOW = "grammar: it takes too long to find which token may follow; make it less ambiguous"

Submit = Callable[[Callable[[], None]], "Future[None]"]


class LLGuidanceMatcher:
    """A `plan.GrammarMatcher` for one request.

    It reads the accepted tokens from the scheduler's list. So rejected drafts and preemptions do not change its state.
    Its first mask and the masks after slow ones are computed on a thread; no other method is called meanwhile.
    """

    def __init__(
        self,
        template: llguidance.LLMatcher,
        vocab_size: int,
        prompt_length: int,
        ends: Collection[int],
        submit: Submit,
    ) -> None:
        """`template` is copied. `ends`: tokens that end the output where the grammar is complete, the model's first."""
        self.words = -(-vocab_size // MASK_WORD)
        self.failure: str | None = None
        self._template, self._matcher = template, template.deep_copy()
        self._start = self._length = prompt_length
        self._ends, self._submit = tuple(ends), submit
        self._path: tuple[int, ...] = ()  # drafted tokens that the matcher has consumed after the text
        self._masks: dict[tuple[int, ...], NDArray[np.int32] | None] = {}
        self._is_slow, self._spent = True, 0.0
        self._running: Future[None] | None = None

    def is_ready(self, text: Sequence[int]) -> bool:
        """See `plan.GrammarMatcher`."""
        if self._running is not None and self._running.done():
            self._running.result()
            self._running = None
        if self._running is None and self._is_slow and not self._is_known(text):
            self._running = self._submit(lambda: self._compute_root(text))
        return self._running is None

    def mask(self, text: Sequence[int], path: tuple[int, ...] = ()) -> NDArray[np.int32] | None:
        """See `plan.GrammarMatcher`."""
        if not self._is_known(text):
            self._compute_root(text)
        if path not in self._masks:
            self._masks[path] = self._compute(text, path)
        return self._masks[path]

    def _is_known(self, text: Sequence[int]) -> bool:
        return self._length == len(text) and () in self._masks

    def _compute_root(self, text: Sequence[int]) -> None:
        """Consume the output tokens since the last call, and find the mask after them."""
        started = time.thread_time()
        self._masks.clear()
        if self._matcher.is_error() and self.failure is None:  # a drafted token went beyond llguidance's limits
            self._matcher, self._path, self._length = self._template.deep_copy(), (), self._start
        self._move_to(())
        for token in text[self._length :]:
            if token not in self._ends:
                self._matcher.consume_token(token)
        self._length = len(text)
        root = self._bits()
        self._spent = time.thread_time() - started
        self._is_slow = self._spent > SLOW
        if self._spent > LONGEST and self._start < self._length and self.failure is None:
            self.failure = TOO_SLOW
        if self.failure is not None:
            root = np.zeros(self.words, dtype=np.int32)
        self._masks[()] = root

    def _compute(self, text: Sequence[int], path: tuple[int, ...]) -> NDArray[np.int32] | None:
        if self._spent > PER_CYCLE or path[-1] in self._ends:
            return None
        parent = self.mask(text, path[:-1])
        if parent is None or not allows(parent, path[-1]):
            return None
        started = time.thread_time()
        mask = self._bits() if self._move_to(path) else None
        self._spent += time.thread_time() - started
        return None if self._matcher.is_error() else mask

    def _move_to(self, path: tuple[int, ...]) -> bool:
        """Roll back to the common prefix with the current path, then consume the rest. False: beyond the limits."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
        self._path = path
        return all(self._matcher.consume_token(token) for token in path[common:])

    def _bits(self) -> NDArray[np.int32]:
        """The mask of the matcher's state. `failure` is set if there is none after the text."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: self.words].copy()
        if self._matcher.is_error() and not self._path:
            reason = readable(self._matcher.get_error(), "")
            self.failure = f"grammar: it cannot be found which token may follow: {reason}"
        if allows(bits, self._ends[0]):
            for end in self._ends[1:]:
                bits[end // MASK_WORD] |= np.int32(np.uint32(1 << end % MASK_WORD).view(np.int32))
        return bits
