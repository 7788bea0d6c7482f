"""Records of running requests: one per HTTP request, and one per engine request that it submits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from eagle_server.request import FinishReason, Request, SpecStats, TokenDelta


@dataclass(eq=False)
class EngineRequestRecord:
    """One engine request. Times are in seconds of time.monotonic().

    `tokens` counts the tokens that the engine generated. `kept` counts the tokens of the answer if the API
    ended it early, as at a stop string. `n` is the number of choices of the prompt, set on the first of them only.
    """

    request: Request
    n: int | None
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    newest_token: float | None = None
    tokens: int = 0
    kept: int | None = None
    last: TokenDelta | None = None
    ended: float | None = None
    engine_died: bool = False

    @property
    def began(self) -> float:
        """When the header of the HTTP request came."""
        return self.submitted if self.request.began is None else self.request.began

    @property
    def answer_tokens(self) -> int:
        return self.tokens if self.kept is None else self.kept

    @property
    def spec(self) -> SpecStats | None:
        return None if self.last is None else self.last.spec

    @property
    def reason(self) -> FinishReason:
        """Why the request ended. A stop string counts as STOP, although the engine request was aborted."""
        if self.kept is not None:
            return FinishReason.STOP
        if self.last is not None and self.last.finish_reason is not None:
            return self.last.finish_reason
        return FinishReason.ERROR if self.engine_died else FinishReason.ABORT


@dataclass(eq=False)
class RequestRecord:
    """One HTTP request. `status` is 0 until the response starts, and that of the error or 499 if a stream did not come
    to its end. `key` is the name of its API key, "" without one."""

    request_id: str
    method: str
    path: str
    headers: Mapping[str, str]
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    status: int = 0
    key: str = ""
    engine_requests: list[EngineRequestRecord] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, as in the response's usage."""
        return sum(len(record.request.prompt_token_ids) for record in self.engine_requests if record.n is not None)

    @property
    def output_tokens(self) -> int:
        return sum(record.answer_tokens for record in self.engine_requests)

    def api_seconds(self, now: float) -> float:
        """Seconds until `now` that this request spent in the API only: before submission and after the last token."""
        return (
            min(record.submitted for record in self.engine_requests)
            - self.began
            + now
            - max(record.ended or now for record in self.engine_requests)
        )

    @property
    def spec(self) -> SpecStats | None:
        """The sum over all engine requests. None if nothing was drafted, or if no request has ended yet."""
        stats = [record.spec for record in self.engine_requests if record.spec is not None]
        if not stats:
            return None
        histogram = [sum(counts) for counts in zip(*(spec.histogram for spec in stats), strict=True)]
        return SpecStats(histogram=histogram, drafted=sum(spec.drafted for spec in stats))


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)


def log_context() -> Mapping[str, str]:
    """The fields that every log line includes: the id of the current HTTP request."""
    record = current_request.get()
    return {} if record is None else {"request_id": record.request_id}


def began() -> float:
    """When the header of this task's HTTP request came, by time.monotonic(). Outside of one: now."""
    record = current_request.get(None)
    return time.monotonic() if record is None else record.began


def waited() -> float:
    """Seconds since the header of this task's HTTP request came; 0 outside of one."""
    return time.monotonic() - began()
