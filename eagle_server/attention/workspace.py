"""The scratch memory that FlashInfer's kernels keep partial results in: one buffer for all wrappers of a process."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 1 << 20  # bytes; sizes are rounded up to it


class Workspace:
    """A device buffer that all wrappers share: kernels run one after the other, and none outlives its forward.

    Invariant: once frozen, `buffer` stays the same tensor, because captured graphs hold its address.
    """

    def __init__(self, device: torch.device, size: int = 0) -> None:
        self.device = device
        self.frozen = False
        self.buffer = self._allocate(max(size, 1))

    def require(self, size: int) -> None:
        """Make room for `size` bytes. Wrappers look at `buffer` anew before they plan.

        Raises:
            RuntimeError: the buffer is frozen and too small.
        """
        if size <= self.buffer.numel():
            return
        if self.frozen:
            raise RuntimeError(
                f"attention needs {size} bytes of workspace, but {self.buffer.numel()} were there when the CUDA graphs "
                "were captured, and they hold its address: prepare the largest batch, with the longest and with short "
                "contexts, before freeze(), or construct Workspace with a larger size"
            )
        self.buffer = self._allocate(size)

    def freeze(self) -> None:
        """From now on growth is an error. Call it when graphs are captured."""
        self.frozen = True

    def _allocate(self, size: int) -> Tensor:
        # Zeros: FlashInfer asks for it before the first use of a decode wrapper.
        return torch.zeros(-(-size // _STEP) * _STEP, dtype=torch.uint8, device=self.device)
