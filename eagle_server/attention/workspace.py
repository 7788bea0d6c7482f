"""The workspace for partial results of FlashInfer's kernels: one buffer for all wrappers of a process."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 1 << 20  # bytes; sizes are rounded up to it


class Workspace:
    """A device buffer that all wrappers share.

    Sharing is safe: kernels run one after another, and no partial result is used after its forward.

    Invariant: once frozen, `buffer` stays the same tensor, because captured graphs hold its address.
    """

    def __init__(self, device: torch.device, size: int = 0) -> None:
        self.device = device
        self.frozen = False
        self.buffer = self._allocate(max(size, 1))

    def require(self, size: int) -> None:
        """Grow the buffer to at least `size` bytes. Wrappers read `buffer` again before each plan.

        Raises:
            RuntimeError: the buffer is frozen and too small.
        """
        if size <= self.buffer.numel():
            return
        if self.frozen:
            raise RuntimeError(
                f"attention needs {size} bytes of workspace, but there were {self.buffer.numel()} when the CUDA graphs "
                "were captured, and the graphs hold its address: plan the largest batch, with the longest and with "
                "short contexts, before freeze(), or construct Workspace with a larger size"
            )
        self.buffer = self._allocate(size)

    def freeze(self) -> None:
        """Make further growth an error. Call it once graphs are captured."""
        self.frozen = True

    def _allocate(self, size: int) -> Tensor:
        # FlashInfer requires zeros before the first use of a decode wrapper.
        return torch.zeros(-(-size // _STEP) * _STEP, dtype=torch.uint8, device=self.device)
