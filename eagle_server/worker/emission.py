"""From what a cycle computed to what its requests get: the one copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.plan import Chunk, CyclePlan, Decode, Emitted
from eagle_server.request import TokenLogprob
from eagle_server.speculation.accept import Accepted
from eagle_server.worker.host import logprobs_to_host, to_host

NOT_FINITE = "the model's logits are not finite (NaN or inf); its weights or the prompt's numerics are broken"


@dataclass(frozen=True)
class Decoded:
    """A verified batch: logits float32 [bs * size, vocab] of trees of `size` nodes, and what was accepted."""

    logits: Tensor
    accepted: Accepted
    size: int


@dataclass(frozen=True)
class Drawn:
    """Prefilled chunks: logits float32 [n, vocab], `logit_rows` of them per chunk, and the last chunks' draws."""

    logits: Tensor
    logit_rows: tuple[int, ...]
    tokens: Tensor  # int64 [last chunks, 1]
    finite: Tensor  # bool [last chunks, 1]


def emit(
    plan: CyclePlan, decoded: Decoded | None, drawn: Drawn | None
) -> tuple[tuple[Emitted, ...], tuple[Emitted, ...]]:
    """What chunks and decodes of the plan get, in its order. Waits for the device."""
    accepted: tuple[Tensor, ...] = ()
    if decoded is not None:
        a = decoded.accepted
        accepted = (a.path, a.tokens, a.drafted, a.finite)
    first = () if drawn is None else (drawn.tokens, drawn.finite)
    values = to_host(*accepted, *first)
    decodes = () if decoded is None else _decodes(plan.decodes, decoded, *values[:4])
    chunks = () if drawn is None else _chunks(plan.chunks, drawn, *values[-2:])
    return chunks, decodes


def _decodes(
    decodes: Sequence[Decode],
    decoded: Decoded,
    paths: list[list[int]],
    tokens: list[list[int]],
    drafted: list[int],
    finite: list[bool],
) -> tuple[Emitted, ...]:
    out = []
    for number, decode in enumerate(decodes):  # what follows them is padding
        rows = [node + number * decoded.size for node in paths[number] if node >= 0]
        kept = tokens[number][: len(rows)]
        logprobs = _logprobs(decoded.logits, rows, kept, decode.sampling.logprobs)
        failed = None if finite[number] else NOT_FINITE
        out.append(Emitted(tuple(kept), drafted[number], logprobs, failed=failed))
    return tuple(out)


def _chunks(
    chunks: Sequence[Chunk], drawn: Drawn, tokens: list[list[int]], finite: list[list[bool]]
) -> tuple[Emitted, ...]:
    out, last, start = [], 0, 0
    for chunk, count in zip(chunks, drawn.logit_rows, strict=True):
        own: tuple[int, ...] = ()
        logprobs = prompt_logprobs = tuple[TokenLogprob, ...]()
        failed = None
        if chunk.next_token is None:
            own = tuple(tokens[last])
            failed = None if finite[last][0] else NOT_FINITE
            logprobs = _logprobs(drawn.logits, [start + count - 1], own, chunk.sampling.logprobs)
            last += 1
        if chunk.prompt_logprobs:
            following = chunk.tokens[1:] + (() if chunk.next_token is None else (chunk.next_token,))
            rows = range(start, start + len(following))
            prompt_logprobs = _logprobs(drawn.logits, rows, following, chunk.sampling.logprobs or 0)
        start += count
        out.append(Emitted(own, 0, logprobs, prompt_logprobs, failed))
    return tuple(out)


def _logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], count: int | None
) -> tuple[TokenLogprob, ...]:
    if count is None:
        return ()
    chosen = logits.index_select(0, upload(rows, logits.device))
    return logprobs_to_host(chosen, upload(tokens, logits.device), count)
