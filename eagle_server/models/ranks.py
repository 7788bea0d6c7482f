"""The processes that compute one target together (tensor parallelism), and what they exchange.

On CPUs the ranks talk by gloo over the loopback interface. On GPUs tensors travel by NCCL, and messages by gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

_BLOCK = 256  # numbers that a message sends at once; a longer one needs a second broadcast
_SIZES = 3  # of them: the kind, and how many numbers and tensor elements follow
_NEVER = timedelta(days=365)  # an idle server waits for requests; the supervisor notices the death of a rank


class RankLost(ConnectionError):
    """Another rank has ended."""


class RankGroup:
    """One rank's place in the group. Rank 0 schedules, drafts and draws; the others follow its messages.

    All ranks must make the same calls in the same order.
    """

    def __init__(self, rank: int, size: int, store: Store, device: torch.device) -> None:
        """Wait for the other ranks, which meet at `store`."""
        self.rank, self.size, self.device = rank, size, device
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _NEVER
        self._messages = gloo(PrefixStore("messages", store), rank, size, options)
        self._tensors: Any = self._messages
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL  # not in builds for CPUs

            self._tensors = ProcessGroupNCCL(PrefixStore("tensors", store), rank, size, ProcessGroupNCCL.Options())

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, the same bits on all ranks. `x` may be overwritten."""
        x = x.contiguous()
        _wait(self._tensors.allreduce, [x])
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` [rows, n], side by side: [rows, size * n]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if len(x):
            _wait(self._tensors.allgather, [parts], [x.contiguous()])
        return torch.cat(parts, dim=1)

    def send(self, kind: int, numbers: Sequence[int] | NDArray[np.int64], *tensors: Tensor) -> None:
        """Rank 0 sends a message to all others: host numbers, and int64 tensors of its device."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0, dtype=torch.int64)
        room = _BLOCK - _SIZES
        block = [kind, len(numbers), len(flat), *numbers[:room]]
        _wait(self._messages.broadcast, torch.tensor(block + [0] * (_BLOCK - len(block))), 0)
        if len(numbers) > room:
            _wait(self._messages.broadcast, torch.tensor(numbers[room:]), 0)
        if len(flat):
            _wait(self._tensors.broadcast, flat, 0)

    def receive(self) -> tuple[int, list[int], Tensor]:
        """The next message: its kind, its numbers, and its tensors, flat and one after the other."""
        block, room = torch.empty(_BLOCK, dtype=torch.int64), _BLOCK - _SIZES
        _wait(self._messages.broadcast, block, 0)
        kind, count, elements, *numbers = block.tolist()
        if count > room:
            rest = torch.empty(count - room, dtype=torch.int64)
            _wait(self._messages.broadcast, rest, 0)
            numbers += rest.tolist()
        flat = torch.empty(elements, dtype=torch.int64, device=self.device)
        if elements:
            _wait(self._tensors.broadcast, flat, 0)
        return kind, numbers[:count], flat


def _wait(collective: Callable[..., Any], *arguments: Any) -> None:
    try:
        collective(*arguments).wait()
    except RuntimeError as error:
        raise RankLost(f"lost the connection to another rank ({error})") from None


def summed(ranks: RankGroup | None, x: Tensor) -> Tensor:
    """The sum over the ranks of a layer that is split; `x` itself for a layer that every rank computes whole."""
    return x if ranks is None else ranks.sum(x)
