"""Sampling settings for tests that draw without an engine."""

from __future__ import annotations

from typing import Any

import msgspec

from eagle_server.plan import RequestSampling
from eagle_server.request import SamplingParams


def request_sampling(
    key: int = 0, *, prompt_length: int = 0, stop_ids: tuple[int, ...] = (), allowed_from: int = 0, **params: Any
) -> RequestSampling:
    """Settings of one request. stop_ids are allowed from position `allowed_from` on; `params` are SamplingParams."""
    given = {"max_tokens": 1, "seed": 0, "min_tokens": max(allowed_from - prompt_length, 0), **params}
    return RequestSampling(SamplingParams(**given), key, prompt_length, stop_ids)


def changed(
    setting: RequestSampling,
    key: int | None = None,
    stop_ids: tuple[int, ...] | None = None,
    allowed_from: int | None = None,
    **params: Any,
) -> RequestSampling:
    """The same settings with the given changes."""
    if allowed_from is not None:
        params["min_tokens"] = allowed_from - setting.prompt_length
    return RequestSampling(
        msgspec.structs.replace(setting.params, **params),
        setting.key if key is None else key,
        setting.prompt_length,
        setting.stop_ids if stop_ids is None else stop_ids,
    )


GREEDY = request_sampling(temperature=0.0)
