"""FlashInfer's paged wrappers in plain torch, with the same signatures, results and restrictions.

    backend = FlashInferAttention(..., module=Emulation())

The real wrappers have surprising behaviour, which the emulation repeats:

* With CUDA graphs, `plan` copies lengths and slots to the buffers given to the constructor, and `run` reads them there.
* A wrapper made with a mask buffer always masks with the buffer's content. A plan without a mask does not change it.
* A plan's schedule is valid only for its lengths. A prefill with a plan for others gives wrong results, as on a GPU:
  `run` does what the int workspace says. A decode raises an error.
* With CUDA graphs, batch size, number of rows, and all values that a captured graph holds by value are fixed.
* Only slots named by the indices are read. A masked value of NaN still gives NaN.
* A workspace that is too small raises an error.
"""

from __future__ import annotations

from types import SimpleNamespace

from tests.support.flashinfer_log import Log
from tests.support.flashinfer_mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from tests.support.flashinfer_paged import (
    SMS,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)


class Emulation:
    """Replaces the module `flashinfer`. `log` records the calls. `sms`: multiprocessors of the emulated GPU."""

    any_dtype = any_head_dim = True

    def __init__(self, *, keep_calls: bool = False, sms: int = SMS) -> None:
        self.log, self.sms = Log(keep_calls), sms
        self.BatchPrefillWithPagedKVCacheWrapper = self._bound(BatchPrefillWithPagedKVCacheWrapper)
        self.BatchDecodeWithPagedKVCacheWrapper = self._bound(BatchDecodeWithPagedKVCacheWrapper)
        self.mla = SimpleNamespace(
            BatchMLAPagedAttentionWrapper=self._bound(BatchMLAPagedAttentionWrapper), MLAPlanMetadata=MLAPlanMetadata
        )

    def _bound(self, cls: type) -> type:
        return type(cls.__name__, (cls,), {"log": self.log, "sms": self.sms})
