"""Before the first request: cycles over nobody's row, so that kernels are compiled and CUDA graphs captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from eagle_server.plan import Chunk, CyclePlan, Decode, Sampling
from eagle_server.worker.worker import Worker

_PROMPT = 128  # tokens: enough for the kernels of long prompts
_GREEDY = Sampling(key=0, temperature=0.0, top_k=0, top_p=1.0)
_DRAWN = Sampling(key=1, temperature=1.0, top_k=0, top_p=1.0)


def warm_up(worker: Worker, sizes: Iterable[int], lengths: Sequence[int] = (2,)) -> None:
    """Run a prompt, and the cycle for batches of `sizes` and committed `lengths`, greedy and drawn."""
    row = worker.batches.pad_row
    width = worker.batches.req_to_token.tensor.shape[1]
    prompt = Chunk(row, 0, (0,) * min(_PROMPT, width), next_token=None, sampling=_GREEDY)
    worker.run(CyclePlan(chunks=(prompt,)))
    for size in sizes:
        for length in lengths:
            for sampling in (_GREEDY, _DRAWN):
                worker.batches.carry.counts[row] = 1
                worker.run(CyclePlan(decodes=(Decode(row, length, verified_id=0, sampling=sampling),) * size))
    worker.run(CyclePlan(released=(row,)))
    if worker.batches.device.type == "cuda":
        torch.cuda.synchronize()
