"""A stand-in for a GPU: CPU tensors that say they are on a second device. Mixing both devices raises, as CUDA does.

    with SecondDevice() as gpu:
        target = load_target(directory, device=gpu.device)  # cuda:0

Tensors that are created on `gpu.device` or moved to it, and results computed from them, have usual values and report
this device. An operation over tensors of both devices raises, unless CUDA allows it: copies, scalars and indices of the
host.

Triton's kernels are replaced by their torch twins. Streams, events and other threads are not emulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from eagle_server.ops import triton_support

aten = torch.ops.aten
_MOVES = (Tensor.to, Tensor.cuda, Tensor.cpu)
_COPIES = (aten.copy_.default, aten._to_copy.default)
# CUDA tensors may be indexed by tensors of the host.
_INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


class SecondDevice:
    """Tensors are told apart by their storages. Those of the second device are kept until the end."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        operations = _Operations(self)
        self._stack.enter_context(patch.object(triton_support, "HAS_TRITON", False))
        self._stack.enter_context(operations)
        self._stack.enter_context(_Calls(self, operations))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the second device."""
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._storages

    def place(self, tensor: Tensor, *, there: bool) -> None:
        """Say that a tensor, and all views of its memory, are on the second device, or on the host."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if there:
            self._storages[storage._cdata] = storage
        else:
            self._storages.pop(storage._cdata, None)


class _Operations(TorchDispatchMode):
    """Refuses operations over both devices, and places their results."""

    def __init__(self, second: SecondDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.second = second
        self.within = False  # within a function over tensors of the second device, which may create others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors((args, kwargs))
        on_second = any(self.second.has(tensor) for tensor in given)
        compared = _tensors((args[0], args[2:])) if func in _INDEXED else given
        on_host = any(tensor.dim() and not (self.second.has(tensor) or tensor.is_meta) for tensor in compared)
        if on_second and on_host and func not in _COPIES:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got cuda:0 and cpu")
        out = func(*args, **(kwargs or {}))
        if func is not aten.copy_.default and (on_second or (self.within and not given)):
            for tensor in _tensors(out):
                self.second.place(tensor, there=True)
        return out


class _Calls(TorchFunctionMode):
    """Answers `tensor.device`, and understands the name of the second device, which the operations below never see."""

    def __init__(self, second: SecondDevice, operations: _Operations) -> None:
        self.second, self.operations = second, operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        given = _tensors((args, kwargs))
        before, self.operations.within = self.operations.within, any(self.second.has(tensor) for tensor in given)
        try:
            return self._answered(func, args, kwargs, given)
        finally:
            self.operations.within = before

    def _answered(self, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
        read = getattr(func, "__self__", None)  # the property, if `func` reads one
        if read in (Tensor.device, Tensor.is_cuda, Tensor.is_cpu) and self.second.has(args[0]):
            return {Tensor.device: self.second.device, Tensor.is_cuda: True, Tensor.is_cpu: False}[read]
        if func is Tensor.numpy and self.second.has(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is Tensor.pin_memory:
            return args[0]
        if func in _MOVES:
            return self._moved(func, *args, **kwargs)
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if wanted is None or wanted.type == "meta":
            return func(*args, **kwargs)
        shared = {tensor.untyped_storage()._cdata for tensor in given if tensor.layout == torch.strided}

        def placed(tensor: Tensor) -> Tensor:
            there = wanted.type == self.second.device.type
            if there != self.second.has(tensor):
                tensor = tensor.clone() if tensor.untyped_storage()._cdata in shared else tensor
                self.second.place(tensor, there=there)
            return tensor

        return tree_map_only(Tensor, placed, func(*args, **{**kwargs, "device": "cpu"}))

    def _moved(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if func is not Tensor.to:
            device, dtype = (self.second.device if func is Tensor.cuda else torch.device("cpu")), None
        elif (other := next(iter(_tensors((args, kwargs))), None)) is not None:
            device, dtype = (self.second.device if self.second.has(other) else other.device), other.dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "meta":
            return tensor.to(device, dtype)
        there = self.second.has(tensor) if device is None else device.type == self.second.device.type
        moved = tensor if dtype is None else tensor.to(dtype)
        if copy or there != self.second.has(moved):
            moved = moved.clone() if moved.untyped_storage()._cdata == tensor.untyped_storage()._cdata else moved
            self.second.place(moved, there=there)
        return moved


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def tensors_of(model: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an object holds, with its path: parameters, buffers, packed weights, tables."""
    seen = set[int]()

    def walk(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, Mapping):
            for key, each in value.items():
                yield from walk(f"{path}.{key}", each)
        elif isinstance(value, list | tuple | set):
            for number, each in enumerate(value):
                yield from walk(f"{path}.{number}", each)
        elif type(value).__module__.startswith(("eagle_server.", "transformers.", "torch.nn.")):
            yield from walk(path, getattr(value, "__dict__", {}))

    yield from walk(type(model).__name__, model)


def elsewhere(model: object, second: SecondDevice) -> list[str]:
    """The paths of tensors that are not on the second device. There must be others."""
    found = dict(tensors_of(model))
    assert any(second.has(tensor) for tensor in found.values())
    return [path for path, tensor in found.items() if not second.has(tensor)]
