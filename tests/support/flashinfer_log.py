"""The call log and the attention function that all emulated FlashInfer wrappers share."""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Call:
    """One call of a wrapper's method, with its arguments."""

    owner: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Log:
    """The calls of all wrappers: always their counts, and on request the calls themselves."""

    keep: bool = False
    calls: list[Call] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def plans(self) -> int:
        return self.counts["plan"]

    @property
    def runs(self) -> int:
        return self.counts["run"]

    @property
    def made(self) -> int:
        return self.counts["__init__"]


def logged(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        log: Log = self.log
        log.counts[method.__name__] += 1
        if log.keep:
            log.calls.append(Call(type(self).__name__, method.__name__, args, kwargs))
        return method(self, *args, **kwargs)

    return wrapped


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [n, H, d], k [m, h, d], v [m, h, e], visible [n, m] -> ([n, H, e], base-2 LSE [n, H]), in float64."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * scale
    scores = scores.masked_fill(~visible, -math.inf)  # adding -inf would keep the NaN of a masked key
    lse = scores.logsumexp(-1) if len(k) else scores.new_full(scores.shape[:2], -math.inf)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("hnm,mhe->nhe", weights, values), lse.t() / math.log(2)


def causal(rows: int, columns: int) -> Tensor:
    """A causal mask, aligned at the bottom right."""
    return torch.arange(columns) <= torch.arange(rows)[:, None] + columns - rows


def everything(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool)


def parameters(method: Callable[..., Any]) -> list[str]:
    """Names of a method's parameters, without self, *args and **kwargs."""
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [n for n, p in inspect.signature(method).parameters.items() if n != "self" and p.kind not in starred]
