"""Data parallel training: processes that torchrun starts share the windows of each step.

A step takes the mean of `accumulate` losses, each over its own windows. Of n processes each computes every n-th loss,
one all_reduce adds up the gradients, and all make the same step of the optimizers. So the number of processes changes
the weights by rounding alone, and a training may go on with another number. The first process evaluates and writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

_PATIENCE = timedelta(hours=6)  # of the others, while the first process evaluates or samples texts


def is_started() -> bool:
    """Whether torchrun has started this process."""
    return bool(dist.is_torchelastic_launched())


def own_device(name: str) -> str:
    """The device of this process: each has the GPU of its local rank.

    Raises:
        ValueError: one GPU is named for all processes.
    """
    if not is_started():
        return name
    if name.startswith("cuda:"):
        raise ValueError(f"--device {name}: every process has a GPU of its own; give --device cuda")
    return f"cuda:{dist.get_node_local_rank()}" if name == "cuda" else name


def size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process evaluates and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """A training together with the other processes, if there are any: by NCCL on GPUs, by gloo on CPUs.

    device: as `own_device` gives it. Only the first process prints and shows progress; all report errors.
    """
    if not is_started():
        yield
        return
    is_gpu = device.startswith("cuda")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo", timeout=_PATIENCE)
    try:
        with open(os.devnull, "w") as nowhere, ExitStack() as quiet:
            if not is_first():
                quiet.enter_context(redirect_stdout(nowhere))
                quiet.enter_context(redirect_stderr(nowhere))
            yield
        dist.barrier()  # the first one has written everything
    finally:
        dist.destroy_process_group()


@contextmanager
def first_before_others() -> Iterator[None]:
    """The first process runs the block before the others do, which find the files that it wrote."""
    if not is_first():
        dist.barrier()
    yield
    if size() > 1 and is_first():
        dist.barrier()


def share(losses: range) -> range:
    """The losses of a step that this process computes. The first process has the last one, whose numbers are shown."""
    if size() == 1:
        return losses
    return losses[size() - 1 - dist.get_rank() :: size()]


@torch.no_grad()
def add_up(parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
    """Add up the gradients of all processes in place, and return the sum of their losses, a scalar.

    A parameter that no process has a gradient of gets none.
    """
    if size() == 1:
        return loss
    has = torch.tensor([parameter.grad is not None for parameter in parameters], device=loss.device)
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    sums = torch.cat([*(grad.float().flatten() for grad in grads), has.float(), loss.float()[None]])
    dist.all_reduce(sums)
    *found, has, loss = sums.split([*(grad.numel() for grad in grads), len(has), 1])
    for parameter, grad, count in zip(parameters, found, has.tolist(), strict=True):
        parameter.grad = grad.view_as(parameter).to(parameter.dtype) if count else None
    return loss[0]


@torch.no_grad()
def copy_first(parameters: Sequence[nn.Parameter]) -> None:
    """Give all processes the weights of the first one."""
    if size() > 1:
        for parameter in parameters:
            dist.broadcast(parameter.data, 0)
