"""The token masks of one request's grammar, with limits for their time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

from eagle_server.engine.grammars.sources import readable
from eagle_server.plan import MASK_WORD, allows

logger = logging.getLogger(__name__)

_FIRST_PENALTY = 4  # tokens after a slow mask whose masks a thread computes; doubled with each slow mask

TOO_SLOW = "grammar: it takes too long to find which token may follow; make it less ambiguous"
Submit = Callable[[Callable[[], None]], "Future[None]"]


@dataclass
class MaskBudget:
    """Seconds of CPU time, so that a busy machine does not look like a slow grammar. An engine's requests share it."""

    slow: float = 0.002  # after a mask of a root that takes longer, the next ones are computed on a thread
    longest: float = 0.1  # for one mask; a longer one ends the request
    per_cycle: float = 0.016  # for the drafted tokens of all requests in a cycle; those beyond it are not verified
    per_request: float = 0.002  # most for the drafted tokens of one request

    def __post_init__(self) -> None:
        self.allowance = self.per_request  # for the drafted tokens of each request in this cycle

    def share(self, requests: int) -> None:
        """Divide a cycle's time among this many requests with grammars."""
        self.allowance = min(self.per_request, self.per_cycle / max(requests, 1))


class LLGuidanceMatcher:
    """A `plan.GrammarMatcher` for one request.

    It reads the accepted tokens from the scheduler's list. So rejected drafts and preemptions do not change its state.
    Its first mask and the masks after slow ones are computed on a thread; no other method is called meanwhile. It
    shares nothing with other matchers: copies of llguidance's would share a lexer, its lock and its limits.

    The text alone decides whether a limit ends the request. Drafted tokens use up a matcher's limits too. So if a
    matcher that has consumed drafted tokens fails, a new one consumes the text as in plain decoding.
    """

    def __init__(
        self,
        make: Callable[[], llguidance.LLMatcher],
        vocab_size: int,
        prompt_length: int,
        ends: Collection[int],
        submit: Submit,
        budget: MaskBudget,
    ) -> None:
        """`ends`: tokens that end a complete output, the model's first."""
        self.words = -(-vocab_size // MASK_WORD)
        self.failure: str | None = None
        self._make, self._submit, self._budget = make, submit, budget
        self._matcher: llguidance.LLMatcher | None = None
        self._start = self._length = prompt_length
        self._ends = tuple(ends)
        self._path: tuple[int, ...] = ()  # drafted tokens that the matcher has consumed after the text
        self._has_drafted = False  # whether the matcher has ever consumed drafted tokens
        self._masks: dict[tuple[int, ...], NDArray[np.int32] | None] = {}
        self._spent = 0.0  # in this cycle
        self._slow_until, self._penalty = prompt_length, _FIRST_PENALTY  # a length of the text, and tokens
        self._running: Future[None] | None = None

    def is_ready(self, tokens: Sequence[int]) -> bool:
        """See `plan.GrammarMatcher`."""
        if self._running is not None and self._running.done():
            if error := self._running.exception():
                logger.error("a token mask failed", exc_info=error)
                self._fail("grammar: which token may follow cannot be found")
            self._running = None
        if self._running is None and not self._is_known(tokens):
            if self._has_drafted and len(tokens) > self._slow_until:
                self._compute_root(tokens)  # drafting needs it now, and the matcher may have to be made anew
            if not self._is_known(tokens) and (self._matcher is None or len(tokens) <= self._slow_until):
                self._running = self._submit(lambda: self._compute_root(tokens))
        return self._running is None

    def mask(self, tokens: Sequence[int], path: tuple[int, ...] = ()) -> NDArray[np.int32] | None:
        """See `plan.GrammarMatcher`."""
        while not self._is_known(tokens):
            self._compute_root(tokens)
        if path not in self._masks:
            self._masks[path] = self._compute(tokens, path)
        return self._masks[path]

    def _is_known(self, tokens: Sequence[int]) -> bool:
        return self.failure is not None or (self._length == len(tokens) and () in self._masks)

    def _compute_root(self, tokens: Sequence[int]) -> None:
        """Consume the output tokens since the last call, and find the mask after them.

        There is no result if the matcher fails and drafted tokens may be the reason: the next call makes a new one.
        """
        started = time.thread_time()
        self._masks.clear()
        root, is_slow = self._advance(tokens)
        self._spent = time.thread_time() - started
        # The first mask does not count: it includes the matcher's compilation.
        if self._spent > self._budget.slow and self._start < len(tokens):
            self._slow_until, self._penalty = len(tokens) + self._penalty, 2 * self._penalty
        if root is None and self._has_drafted:
            self._drop()
        elif root is None:
            assert self._matcher is not None
            reason = readable(self._matcher.get_error(), "")
            self._fail(f"grammar: it cannot be found which token may follow: {reason}")
        elif is_slow:
            self._fail(TOO_SLOW)
        else:
            self._masks[()] = root

    def _advance(self, tokens: Sequence[int]) -> tuple[NDArray[np.int32] | None, bool]:
        """The mask after the text, and whether a mask took too long. None: a limit is reached, or text is not allowed.

        A matcher without drafted tokens computes a mask after each token, as in plain decoding. So both fail at the
        same token.
        """
        root, is_slow = None, False
        if self._matcher is None:
            self._matcher, self._length = self._make(), self._start
            root = self._bits()
        self._move_to(())
        while self._length < len(tokens) and not self._matcher.is_error():
            started, end = time.thread_time(), len(tokens) if self._has_drafted else self._length + 1
            for token in tokens[self._length : end]:
                if token not in self._ends:
                    self._matcher.consume_token(token)
            root = self._bits()
            is_slow = is_slow or time.thread_time() - started > self._budget.longest * (end - self._length)
            self._length = end
        self._length = len(tokens)
        return root, is_slow

    def _drop(self) -> None:
        """Drop the matcher. A new one computes the next mask."""
        self._matcher, self._path, self._has_drafted = None, (), False

    def _fail(self, reason: str) -> None:
        """Allow no further token, for this reason."""
        self.failure = self.failure or reason
        self._masks[()] = np.zeros(self.words, dtype=np.int32)

    def _compute(self, tokens: Sequence[int], path: tuple[int, ...]) -> NDArray[np.int32] | None:
        if self._spent > self._budget.allowance or len(tokens) < self._slow_until or path[-1] in self._ends:
            return None
        parent = self.mask(tokens, path[:-1])
        if parent is None or not allows(parent, path[-1]) or self._matcher is None:
            return None
        started = time.thread_time()
        mask = self._bits() if self._move_to(path) else None
        if mask is None:
            self._drop()
        self._spent += time.thread_time() - started
        return mask

    def _move_to(self, path: tuple[int, ...]) -> bool:
        """Roll back to the common prefix with the current path, then consume the rest. False: beyond the limits."""
        assert self._matcher is not None
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
            # Compute a mask here, or llguidance 1.9.1 may use rows of the old path for the new one.
            self._matcher.compute_bitmask()
            self._path = path[:common]
        for token in path[common:]:
            self._has_drafted = True
            if not self._matcher.consume_token(token):
                return False
            self._path += (token,)
        return True

    def _bits(self) -> NDArray[np.int32] | None:
        """The mask of the matcher's state; None beyond the limits."""
        assert self._matcher is not None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: self.words].copy()
        if self._matcher.is_error():
            return None
        if allows(bits, self._ends[0]):
            for end in self._ends[1:]:
                bits[end // MASK_WORD] |= np.int32(np.uint32(1 << end % MASK_WORD).view(np.int32))
        return bits
