"""FlashInfer's paged wrappers in plain torch: the same signatures, the same results, the same traps.

    backend = FlashInferAttention(..., module=Emulation())

What the real ones do that surprises, and what is done here too:

* With CUDA graphs `run` reads lengths and slots from the buffers given to the constructor, `plan` copies there.
* A wrapper made with a mask buffer masks always, with whatever stands in it; plan without a mask leaves it alone.
* A plan's schedule fits the lengths it was planned for: `run` refuses any other that it finds in the buffers.
* With CUDA graphs batch size and number of rows are fixed, and so is whatever a captured graph holds by value.
* Only slots named by the indices are read, and a masked value of NaN still gives NaN.
* Workspaces that are too small are refused.
"""

from __future__ import annotations

from types import SimpleNamespace

from tests.support.flashinfer_log import Log
from tests.support.flashinfer_mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from tests.support.flashinfer_paged import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper


class Emulation:
    """Stands in for the module `flashinfer`; `log` says what was called."""

    any_dtype = any_head_dim = True

    def __init__(self, *, keep_calls: bool = False) -> None:
        self.log = Log(keep_calls)
        self.BatchPrefillWithPagedKVCacheWrapper = self._bound(BatchPrefillWithPagedKVCacheWrapper)
        self.BatchDecodeWithPagedKVCacheWrapper = self._bound(BatchDecodeWithPagedKVCacheWrapper)
        self.mla = SimpleNamespace(
            BatchMLAPagedAttentionWrapper=self._bound(BatchMLAPagedAttentionWrapper), MLAPlanMetadata=MLAPlanMetadata
        )

    def _bound(self, cls: type) -> type:
        return type(cls.__name__, (cls,), {"log": self.log})
