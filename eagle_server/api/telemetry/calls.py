"""A call is an HTTP request; a generation is one engine request of it. What is known of them while they run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from eagle_server.request import FinishReason, Request, SpecStats, TokenDelta


@dataclass(eq=False)
class Generation:
    """Times are those of time.monotonic(). `tokens` is what the engine generated, `kept` what of it is the answer.

    They differ where a stop string was found before the end of a cycle's tokens. `n` is the number of choices of the
    prompt, on the first of them.
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
    def answer_tokens(self) -> int:
        return self.tokens if self.kept is None else self.kept

    @property
    def spec(self) -> SpecStats | None:
        return None if self.last is None else self.last.spec

    @property
    def reason(self) -> FinishReason:
        """Why it ended, once nobody waits for it; a stop string is a stop, though the engine had to be told."""
        if self.kept is not None:
            return FinishReason.STOP
        if self.last is not None and self.last.finish_reason is not None:
            return self.last.finish_reason
        return FinishReason.ERROR if self.engine_died else FinishReason.ABORT


@dataclass(eq=False)
class Call:
    """`status` is 0 until the answer starts; `n` of a generation marks the first choice of each prompt."""

    request_id: str
    method: str
    path: str
    headers: Mapping[str, str]
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    status: int = 0
    generations: list[Generation] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Every prompt counts once, as in the usage of an answer."""
        return sum(len(each.request.prompt_token_ids) for each in self.generations if each.n is not None)

    @property
    def output_tokens(self) -> int:
        return sum(each.answer_tokens for each in self.generations)

    def own_seconds(self, now: float) -> float:
        """Of its time until `now`, its end, that in which the engine had nothing to do with it."""
        return (
            min(each.submitted for each in self.generations)
            - self.began
            + now
            - max(each.ended or now for each in self.generations)
        )

    @property
    def spec(self) -> SpecStats | None:
        """That of all generations together; None where nothing was drafted, or is not known yet to have been."""
        stats = [each.spec for each in self.generations if each.spec is not None]
        if not stats:
            return None
        histogram = [sum(counts) for counts in zip(*(each.histogram for each in stats), strict=True)]
        return SpecStats(histogram=histogram, drafted=sum(each.drafted for each in stats))


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)


def log_context() -> Mapping[str, str]:
    """What every line of the log should tell: the id of the request that it was logged for."""
    call = current_call.get()
    return {} if call is None else {"request_id": call.request_id}
