"""Follows every engine request from its submission to its end, and tells metrics and log."""

from __future__ import annotations

import time
from collections.abc import Sequence

from eagle_server.api.telemetry.calls import Generation, current_call
from eagle_server.api.telemetry.metrics import Metrics
from eagle_server.api.telemetry.summary import Summary
from eagle_server.request import Deltas, Ready, Request, TokenDelta


class Telemetry:
    """The client's observer."""

    def __init__(self, metrics: Metrics, summary: Summary) -> None:
        self.metrics = metrics
        self._summary = summary
        self._generations: dict[str, Generation] = {}

    def attached(self, ready: Ready) -> None:
        self.metrics.attached(ready)

    def detached(self) -> None:
        for generation in self._generations.values():
            generation.engine_died = True

    def submitted(self, requests: Sequence[Request]) -> None:
        call = current_call.get()
        prompts = {id(request.prompt_token_ids) for request in requests}  # choices of one prompt share its tokens
        n = len(requests) // max(len(prompts), 1)
        for request in requests:
            prompt = id(request.prompt_token_ids)
            generation = Generation(request, n if prompt in prompts else None)
            prompts.discard(prompt)
            self._generations[request.request_id] = generation
            if call is not None:
                call.generations.append(generation)

    def dispatched(self, message: Deltas) -> None:
        now = time.monotonic()
        generated = 0
        for delta in message.deltas:
            generated += len(delta.token_ids)
            generation = self._generations.get(delta.request_id)
            if generation is not None:
                self._advance(generation, delta, now)
        if message.cycle is not None:
            self.metrics.cycle(message.cycle, generated)
            self._summary.cycle(message.cycle, generated, message.stats, now)

    def completed(self, request_id: str, kept: int) -> None:
        if request_id in self._generations:
            self._generations[request_id].kept = kept

    def left(self, requests: Sequence[Request]) -> None:
        for request in requests:
            generation = self._generations.pop(request.request_id, None)
            if generation is not None:
                self.metrics.finished(generation)

    def _advance(self, generation: Generation, delta: TokenDelta, now: float) -> None:
        if delta.token_ids:
            if generation.newest_token is None:
                generation.first_token = now
                self.metrics.first_token(now - generation.submitted)
            else:
                self.metrics.next_tokens(now - generation.newest_token)
            generation.newest_token = now
            generation.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            generation.last, generation.ended = delta, now
