"""CUDA graphs: a function of tensors is captured once per key and then replayed, without launches from the CPU.

Inputs are tensors, or dataclasses that hold some (`ops/captured.py`). A function can be captured if its shapes follow
from the key alone, if it reads no host value that changes between calls with an equal key, and if it never waits for
the device. A replay copies the inputs' tensors into the captured ones and writes the same output tensors. Outputs are
new objects in each call, because objects keep what they have computed (cached_property).

A key begins with its function's name. Captures with one name share a memory pool, so a replay may write to the outputs
of any of them: read these before the next call with that name. Calls with other names leave them as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from eagle_server.ops.captured import TensorReader, builder

Output = TypeVar("Output")
GraphKey = tuple[str, *tuple[Hashable, ...]]  # the function's name, and what its shapes follow from


class Recorder(Protocol):
    """Captures what a function does on the device: `CudaRecorder`, or a stand-in in tests."""

    def record(self, function: Callable[[], Output], pool: str) -> tuple[Callable[[], None], Output]:
        """A function that replays the captured call, and the outputs that it writes."""
        ...


@dataclass(frozen=True)
class _Captured:
    """`buffers`: the captured inputs by dtype, with their places among an input's tensors."""

    reader: TensorReader
    buffers: tuple[tuple[list[Tensor], list[int]], ...]
    replay: Callable[[], None]
    outputs: Callable[[], Any]

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """Copy the inputs, one kernel for all of a dtype, and replay."""
        tensors = self.reader.read(inputs)
        for buffers, places in self.buffers:
            torch._foreach_copy_(buffers, [tensors[place] for place in places])
        self.replay()
        return self.outputs()


class Graphs:
    """Runs functions through captured graphs. Without a recorder, or while paused, it calls them directly."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        self._is_paused = False
        self._captured: dict[GraphKey, _Captured] = {}

    @property
    def captures(self) -> bool:
        """Whether there is a recorder: the device runs what the host has only launched."""
        return self._recorder is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture and replay nothing in this block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def run(self, key: GraphKey | None, function: Callable[..., Output], *inputs: Any) -> Output:
        """function(*inputs). A key of None is never captured."""
        if self._recorder is None or key is None or self._is_paused:
            return function(*inputs)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = _capture(self._recorder, key[0], function, inputs)
        return captured.run(inputs)  # type: ignore[no-any-return]

    def holds(self, key: GraphKey) -> bool:
        """Whether `key` was captured."""
        return key in self._captured

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """What was captured so far."""
        return tuple(self._captured)


def _capture(recorder: Recorder, pool: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> _Captured:
    reader = TensorReader(inputs)
    tensors = [tensor.clone() for tensor in reader.read(inputs)]
    build = builder(inputs, iter(tensors))
    replay, outputs = recorder.record(lambda: function(*build()), pool)
    places = [
        [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
    ]
    buffers = tuple(([tensors[place] for place in each], each) for each in places)
    return _Captured(reader, buffers, replay, builder(outputs))


class CudaRecorder:
    """Captures into CUDA graphs."""

    WARM_UPS = 2  # compiles kernels and lets libraries allocate their workspaces, neither of which may be captured

    def __init__(self) -> None:
        self._pools: defaultdict[str, Any] = defaultdict(torch.cuda.graph_pool_handle)
        self._stream = torch.cuda.Stream()

    def record(self, function: Callable[[], Output], pool: str) -> tuple[Callable[[], None], Output]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pools[pool], stream=self._stream):
            outputs = function()
        return graph.replay, outputs


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes that graphs are captured for: 1, 2, 4, 8, then every 8, up to `largest`, which is always one."""
    sizes = [size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest]
    return (*sizes, largest) if largest else ()
