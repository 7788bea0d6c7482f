"""Warm-up cycles on the padding row, before the first request: they compile kernels and capture CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from eagle_server.plan import Chunk, CyclePlan, Decode, RequestSampling
from eagle_server.request import SamplingParams
from eagle_server.worker.worker import Worker

_PROMPT = 128  # tokens: enough for the kernels of long prompts
_GREEDY = RequestSampling(SamplingParams(max_tokens=1, seed=0, temperature=0.0), key=0)
_SAMPLED = RequestSampling(SamplingParams(max_tokens=1, seed=0), key=1)
_TRUNCATED = RequestSampling(SamplingParams(max_tokens=1, seed=0, top_k=50, top_p=0.9), key=1)


def warm_up(worker: Worker, sizes: Iterable[int], lengths: Sequence[int] = (2,)) -> None:
    """Run a long prompt, a prompt of one token, both at once, and decode batches of these sizes and sequence
    lengths."""
    row = worker.batches.pad_row
    width = worker.batches.req_to_token.tensor.shape[1]
    long, short = (Chunk(row, 0, (0,) * n, next_token=None, sampling=_GREEDY) for n in (min(_PROMPT, width), 1))
    for chunks in ((long,), (short,), (short, long)):
        worker.run(CyclePlan(chunks=chunks))
    shortest, *longer = [(length, _GREEDY) for length in lengths]
    for size in sizes:
        for length, sampling in (shortest, *longer, (shortest[0], _SAMPLED), (shortest[0], _TRUNCATED)):
            decodes = (Decode(row, length, verified_id=0, sampling=sampling),) * size
            worker.run(CyclePlan(decodes=decodes, released=(row,)))
    worker.run(CyclePlan(released=(row,)))
    if worker.batches.device.type == "cuda":
        torch.cuda.synchronize()
