"""Counts what a cycle would launch on a GPU, on a CPU: kernels and copies from the host, by stage.

The cycle takes the GPU's branches: launches of Triton's kernels are counted while torch twins compute, FlashInfer is
emulated, and a graph replays its function. An operation of torch counts as one kernel, unless it only makes a view or
allocates. So does a kernel of Triton or FlashInfer, whatever runs inside it. FlashInfer's attention is two where it
splits KV.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_server.ops import device as device_module
from eagle_server.worker import host
from tests.support.flashinfer_emulation import Emulation
from tests.support.fused_kernels import fake_flashinfer, use_kernel_branch
from tests.support.launches import compute_with_twins
from tests.support.replay import FirstCall, FirstCallRecorder, own, tensors_of

Output = TypeVar("Output")

aten = torch.ops.aten
ALLOCATIONS_AND_VIEWS = {
    *(aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default),
    *(aten.new_empty_strided.default, aten._unsafe_view.default, aten.lift_fresh.default),
    *(aten.detach.default, aten.detach_.default),
}


class LaunchCounter(TorchDispatchMode):
    """Kernels and uploads by stage, counted inside `stage` only."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.uploads: Counter[str] = Counter()
        self._stages: list[str] = []
        self._paused = 0

    def clear(self) -> None:
        self.kernels.clear()
        self.uploads.clear()

    def numbers(self, repeated: str, times: int) -> dict[str, tuple[int, int]]:
        """Kernels and uploads of each stage. The stage `repeated` ran so many times: the numbers of one time."""
        found = {stage: (kernels.total(), self.uploads[stage]) for stage, kernels in self.kernels.items()}
        kernels, uploads = found[repeated]
        assert kernels % times == uploads % times == 0, "not all of them launched as many"
        return found | {repeated: (kernels // times, uploads // times)}

    def table(self) -> str:
        """Stages with their kernels and uploads, and below each the operations that are launched most."""
        lines = []
        for stage, found in self.kernels.items():
            lines.append(f"{stage:12} {found.total():4} kernels {self.uploads[stage]:3} uploads")
            lines.append("    " + ", ".join(f"{name} {count}" for name, count in found.most_common()))
        return "\n".join(lines)

    def launch(self, name: str) -> None:
        if self._stages and not self._paused:
            self.kernels[self._stages[-1]][name] += 1

    def upload(self) -> None:
        if self._stages and not self._paused:
            self.uploads[self._stages[-1]] += 1

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._stages.append(name)
        yield
        self._stages.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused += 1
        yield
        self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._stages:
            return func(*args, **kwargs)
        with self:  # under inference mode composite operations arrive whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        written = [args[0][0]] if result is None else tensors_of(result)  # None: of a list of tensors
        if func not in ALLOCATIONS_AND_VIEWS and not _is_view(func) and any(t.numel() for t in written):
            self.launch(func.name().removeprefix("aten::"))
        return result

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, stage: str) -> None:
        """Count what this function launches as `stage`."""
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.stage(stage):
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    def as_one(self, original: Callable[..., Output], name: str) -> Callable[..., Output]:
        """The function as one kernel."""

        def kernel(*args: Any, **kwargs: Any) -> Output:
            self.launch(name)
            with self.paused():
                return original(*args, **kwargs)

        return kernel


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


class CountedRecorder(FirstCallRecorder):
    """Replays without the copies to the graph's outputs, because a graph writes them itself."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def record(self, function: Callable[[], Output], pool: str) -> tuple[Callable[[], None], Output]:
        with self._counter.paused():
            _, outputs = super().record(function, pool)
        call = self.pools[pool][-1]
        return _CountedCall(call.function, call.outputs, call.spoiled, self._counter).replay, outputs


class _CountedCall(FirstCall):
    def __init__(
        self, function: Callable[[], Any], outputs: list[Tensor], spoiled: list[Tensor], counter: LaunchCounter
    ) -> None:
        super().__init__(function, outputs, spoiled)
        object.__setattr__(self, "counter", counter)

    def replay(self) -> None:
        found = self.function()
        with self.counter.paused():  # type: ignore[attr-defined]
            self.write(own(found))


def take_gpu_branches(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter) -> Emulation:
    """Let the package run on the CPU what it runs on a GPU. Returns the emulated FlashInfer."""
    functions = vars(fake_flashinfer())
    use_kernel_branch(monkeypatch, SimpleNamespace(**{n: counter.as_one(f, n) for n, f in functions.items()}))
    compute_with_twins(monkeypatch, counter.paused)
    _count_triton(monkeypatch, counter)
    _count_copies(monkeypatch, counter)
    return _counted_flashinfer(monkeypatch, counter)


def _count_triton(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *_, **__: counter.launch(self.fn.__name__))


def _count_copies(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter) -> None:
    """Uploads, and the copy of the results, which on a GPU are packed first."""

    class Torch(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "as_tensor":
                counter.upload()
            return getattr(torch, name)

    begin = host.HostCopy.__init__

    def packed(self: host.HostCopy, tensors: Mapping[str, Tensor]) -> None:
        begin(self, tensors)
        if tensors:
            host._packed(tuple(tensors.values()))

    monkeypatch.setattr(device_module, "torch", Torch("torch"))
    monkeypatch.setattr(host.HostCopy, "__init__", packed)


def _counted_flashinfer(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter) -> Emulation:
    """A plan copies its schedule, and the metadata that its arguments hold."""
    module = Emulation(sms=132)

    def plan(original: Callable[..., Any]) -> Callable[..., Any]:
        def planned(self: Any, *metadata: Any, **kwargs: Any) -> Any:
            for _ in ["schedule", *(tensor for tensor in metadata if tensor.numel())]:
                counter.upload()
            with counter.paused():
                return original(self, *metadata, **kwargs)

        return planned

    def aside(original: Callable[..., Any]) -> Callable[..., Any]:
        def unseen(*args: Any, **kwargs: Any) -> Any:
            with counter.paused():
                return original(*args, **kwargs)

        return unseen

    for wrapper in (module.BatchPrefillWithPagedKVCacheWrapper, module.BatchDecodeWithPagedKVCacheWrapper):
        monkeypatch.setattr(wrapper, "plan", plan(wrapper.plan))
        monkeypatch.setattr(wrapper, "run", _with_merge(wrapper.run, counter))
        for name in ("__init__", "workspace_size"):
            monkeypatch.setattr(wrapper, name, aside(getattr(wrapper, name)))
    return module


def _with_merge(original: Callable[..., Any], counter: LaunchCounter) -> Callable[..., Any]:
    """A plan that splits KV is followed by the kernel that merges chunks. With CUDA graphs decode plans split it."""
    attention = counter.as_one(original, "attention")

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._plan_info[-1] if hasattr(self, "_plan_info") else self._graph:
            counter.launch("merge of split KV")
        return attention(self, *args, **kwargs)

    return run
