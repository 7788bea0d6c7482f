"""Follows every engine request from submission to end, and updates metrics and the summary log."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec.structs import replace

from eagle_server.api.telemetry.metrics import ServerMetrics
from eagle_server.api.telemetry.request_record import EngineRequestRecord, current_request
from eagle_server.api.telemetry.summary import Summary
from eagle_server.client.observer import Observer
from eagle_server.request import Deltas, Ready, Request, TokenDelta


class Telemetry(Observer):
    """The observer of the engine client."""

    def __init__(self, metrics: ServerMetrics, summary: Summary) -> None:
        self.metrics = metrics
        self._summary = summary
        self._records: dict[str, EngineRequestRecord] = {}

    def attached(self, ready: Ready) -> None:
        self.metrics.attached(ready)

    def detached(self) -> None:
        for record in self._records.values():
            record.engine_died = True

    def submitted(self, requests: Sequence[Request]) -> None:
        http_request = current_request.get()
        # the choices of one prompt share its list of tokens
        prompts = {id(request.prompt_token_ids) for request in requests}
        n = len(requests) // max(len(prompts), 1)
        for request in requests:
            prompt = id(request.prompt_token_ids)
            record = EngineRequestRecord(request, n if prompt in prompts else None)
            prompts.discard(prompt)
            self._records[request.request_id] = record
            if http_request is not None:
                http_request.engine_requests.append(record)

    def dispatched(self, message: Deltas) -> None:
        now = time.monotonic()
        generated = 0
        for delta in message.deltas:
            generated += len(delta.token_ids)
            record = self._records.get(delta.request_id)
            if record is not None:
                self._advance(record, delta, now)
        if message.cycle is not None:
            self.metrics.cycle(message.cycle, generated)
            self._summary.cycle(message.cycle, generated, message.stats, now)

    def completed(self, request_id: str, kept: int) -> None:
        if request_id in self._records:
            self._records[request_id].kept = kept

    def left(self, requests: Sequence[Request]) -> None:
        for request in requests:
            record = self._records.pop(request.request_id, None)
            if record is not None:
                self.metrics.finished(record)

    def _advance(self, record: EngineRequestRecord, delta: TokenDelta, now: float) -> None:
        if delta.token_ids:
            if record.newest_token is None:
                record.first_token = now
                self.metrics.first_token(now - record.submitted)
            else:
                self.metrics.next_tokens(now - record.newest_token)
            record.newest_token = now
            record.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            # Keep nothing that takes memory: the record stays until the HTTP request ends.
            record.last, record.ended = replace(delta, logprobs=None, prompt_logprobs=None, tree=None), now
