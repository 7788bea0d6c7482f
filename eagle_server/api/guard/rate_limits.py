"""Limits of one API key: how many of its requests run at once, and how many tokens it gets per minute."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus

from eagle_server.api.errors import ApiError, bad_request

WINDOW = 60  # seconds
CODE = "rate_limit_exceeded"  # OpenAI's
LIMIT_HEADERS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")  # OpenAI's

Clock = Callable[[], float]


class TokenWindow:
    """The tokens of the last minute, by the second. Requests start only while their prompts fit into `limit`.

    Running requests add the tokens that they generate even beyond the limit. So a minute exceeds the limit at most by
    the output of the requests that run when the limit is reached.
    """

    def __init__(self, limit: int, clock: Clock = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._seconds = deque[tuple[int, int]]()  # second, tokens
        self._used = 0

    @property
    def used(self) -> int:
        """Tokens of the last minute."""
        now = self._clock()
        while self._seconds and self._end(self._seconds[0][0]) <= now:
            self._used -= self._seconds.popleft()[1]
        return self._used

    def add(self, tokens: int) -> None:
        """Count tokens that are used now."""
        self._used, second = self.used + tokens, math.floor(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            tokens += self._seconds.pop()[1]
        self._seconds.append((second, tokens))

    def wait(self, tokens: int) -> float:
        """Seconds until `tokens`, at most the limit, fit into the window; 0: they do now."""
        used, end = self.used, self._clock()
        for second, count in self._seconds:
            if used + tokens <= self.limit:
                break
            used, end = used - count, self._end(second)
        return end - self._clock()

    @staticmethod
    def _end(second: int) -> int:
        """When the last token of a second is a minute old."""
        return second + 1 + WINDOW


class ClientLimits:
    """The requests and tokens of one API key, or of all clients if none is needed. None: no limit."""

    def __init__(
        self,
        max_concurrent_requests: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._max_concurrent_requests = max_concurrent_requests
        self._running = 0
        self._window = None if tokens_per_minute is None else TokenWindow(tokens_per_minute, clock)

    def refusal(self) -> ApiError | None:
        """Why no request may start now; None if one may."""
        most = self._max_concurrent_requests
        if most is not None and self._running >= most:
            return _too_many(f"{self._running} requests are in progress, at most {most} may be, per API key")
        return self._token_refusal(1)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A request runs for the duration of the block, in which `current_limits` is set."""
        self._running += 1
        limits = current_limits.set(self)
        try:
            yield
        finally:
            current_limits.reset(limits)
            self._running -= 1

    def check_prompt(self, tokens: int, param: str) -> None:
        """
        Raises:
            ApiError: a prompt of this many tokens does not fit into this minute (429), or into any (400).
        """
        if self._window is not None and tokens > self._window.limit:
            raise bad_request(f"{tokens} prompt tokens; this server allows {self._window.limit} a minute", param, CODE)
        refusal = self._token_refusal(tokens)
        if refusal is not None:
            raise refusal

    def _token_refusal(self, needed: int) -> ApiError | None:
        seconds = 0 if self._window is None else math.ceil(self._window.wait(needed))
        if self._window is None or not seconds:
            return None
        used, limit = self._window.used, self._window.limit
        return _too_many(f"{used} of {limit} tokens a minute are used, this request needs {needed}", seconds)

    def use_tokens(self, count: int) -> None:
        """Count the tokens of an admitted prompt, or generated tokens."""
        if self._window is not None and count:
            self._window.add(count)

    @property
    def headers(self) -> Mapping[str, str]:
        """OpenAI's headers about tokens."""
        if self._window is None:
            return {}
        limit = self._window.limit
        remaining, reset = max(0, limit - self._window.used), math.ceil(self._window.wait(limit))
        return dict(zip(LIMIT_HEADERS, (str(limit), str(remaining), f"{reset}s"), strict=True))


def _too_many(message: str, seconds: int = 1) -> ApiError:
    text = f"{message}; try again in {seconds} s"
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, text, code=CODE, headers={"retry-after": str(seconds)})


current_limits: ContextVar[ClientLimits] = ContextVar("current_limits", default=ClientLimits())  # noqa: B039
current_client: ContextVar[str] = ContextVar("current_client", default="")  # its API key's name, else its address
