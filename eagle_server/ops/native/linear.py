"""Linear layers by the native kernels: packed weights, in 32, 16, 8 or 4 bits."""

from __future__ import annotations

from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight
from eagle_server.ops.native.library import empty, floats, functions, pointer, session
from eagle_server.ops.native.structs import PackedStruct

_FLOAT32, _HALVED, _BFLOAT16, _INT8, _INT4, _MXFP4 = range(6)  # Kind in packed.h
_KINDS: dict[Quantization, int] = {"int8": _INT8, "int4": _INT4, "mxfp4": _MXFP4}
_GROUP = 16  # outputs that are packed together
CACHE_LINE = 64  # bytes


class NativeWeight:
    """A weight [out, in] packed for the native kernels. A tied embedding is a copy of its own.

    float32 weights that bfloat16 holds exactly, as those of most checkpoints, take half the memory.
    """

    def __init__(self, weight: Tensor | QuantizedWeight) -> None:
        self.scales = self.zeros = None
        self._group = 0
        if isinstance(weight, QuantizedWeight):
            self.dtype, source = torch.float32, weight.codes.contiguous()
            self._kind, self._group = _KINDS[weight.quantization], weight.group
            self.scales, self.zeros = _padded(weight.scales), _padded(weight.zeros)
            if self._kind == _MXFP4:  # its scales are powers of two, whose exponents are bytes
                self.zeros, self.scales = (self.scales.view(torch.int32) >> 23).to(torch.uint8), None
        else:
            self.dtype, source = weight.dtype, weight.detach().contiguous()
            self._kind = _BFLOAT16 if weight.dtype == torch.bfloat16 else _FLOAT32
            halves = source.bfloat16()
            if self._kind == _FLOAT32 and torch.equal(source, halves.float()):
                self._kind, source = _HALVED, halves
        self.outputs, self.inputs = source.shape
        shape = self._struct(None, None)
        self.data = torch.empty(functions().eagle_packed_bytes(byref(shape)), dtype=torch.uint8, device="cpu")
        functions().eagle_pack(session(), byref(shape), pointer(source), pointer(self.data))

    @classmethod
    def packed(
        cls,
        shape: tuple[int, int],
        quantization: Quantization,
        group: int,
        data: Tensor,
        zeros: Tensor,
        scales: Tensor | None = None,
    ) -> NativeWeight:
        """A weight [out, in] of `shape` from the `tensors` of another one.

        Raises:
            ValueError: the tensors are not of that shape, or no cache line begins where `data` does.
        """
        weight = cls.__new__(cls)
        weight.dtype, weight.data, weight.scales, weight.zeros = torch.float32, data, scales, zeros
        weight._kind, weight._group = _KINDS[quantization], group
        weight.outputs, weight.inputs = shape
        padded = (-(-weight.inputs // group), -(-weight.outputs // _GROUP) * _GROUP)
        packed = functions().eagle_packed_bytes(byref(weight._struct(None, None)))
        groups = [zeros] if weight._kind == _MXFP4 or scales is None else [zeros, scales]
        if (scales is None) != (weight._kind == _MXFP4) or data.nbytes != packed:
            raise ValueError(f"these are no packed weights of shape {list(shape)}")
        if any(tuple(values.shape) != padded for values in groups):
            raise ValueError(f"these are no packed weights of shape {list(shape)}")
        types = {data.dtype, zeros.dtype}, torch.float32 if scales is None else scales.dtype
        if data.data_ptr() % CACHE_LINE or types != ({torch.uint8}, torch.float32):
            raise ValueError("packed weights must be bytes that begin at cache lines")
        return weight

    def rows_from(self, first: int) -> NativeWeight:
        """The outputs from `first` on, a multiple of 16, over the same memory."""
        assert first % _GROUP == 0, "outputs are packed by 16"
        rest = NativeWeight.__new__(NativeWeight)
        rest.dtype, rest._kind, rest._group, rest.inputs = self.dtype, self._kind, self._group, self.inputs
        rest.outputs = self.outputs - first
        groups = -(-self.outputs // _GROUP)
        rest.data = self.data[self.data.nbytes // groups * (first // _GROUP) :]
        rest.scales, rest.zeros = (x if x is None else x[:, first:].contiguous() for x in (self.scales, self.zeros))
        return rest

    def rows_until(self, count: int) -> NativeWeight:
        """The first `count` outputs, over the same memory. Rounded weights have a copy of the scales."""
        begin = NativeWeight.__new__(NativeWeight)
        begin.dtype, begin._kind, begin._group, begin.inputs = self.dtype, self._kind, self._group, self.inputs
        begin.outputs, begin.data = count, self.data
        padded = -(-count // _GROUP) * _GROUP
        begin.scales, begin.zeros = (x if x is None else x[:, :padded].contiguous() for x in (self.scales, self.zeros))
        return begin

    def tensors(self) -> dict[str, Tensor]:
        """What `packed` takes, of rounded weights."""
        parts = {"data": self.data, "scales": self.scales, "zeros": self.zeros}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def quantization(self) -> Quantization | None:
        return next((name for name, kind in _KINDS.items() if kind == self._kind), None)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self._group

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.data, self.scales, self.zeros) if each is not None)

    def struct(self, bias: Tensor | None) -> PackedStruct:
        """`bias` float32 [out] must outlive the result, as this object must."""
        return self._struct(self.data, bias)

    def dense(self) -> Tensor:
        """The weight [out, in] that is computed with, bit for bit."""
        halves = torch.bfloat16 if self._kind in (_HALVED, _BFLOAT16) else torch.float32
        stored = halves if self.zeros is None else torch.uint8
        out = torch.empty(self.outputs, self.inputs, dtype=stored, device="cpu")
        functions().eagle_unpack(session(), byref(self.struct(None)), pointer(out))
        if self.zeros is None:
            return out.to(self.dtype)
        zeros = self.zeros[:, : self.outputs]
        if self.scales is None:
            scales = (zeros.int() << 23).view(torch.float32)
            return QuantizedWeight("mxfp4", out, scales, torch.zeros_like(zeros), self._group).dense()
        scales = self.scales[:, : self.outputs]
        return QuantizedWeight("int8" if self._kind == _INT8 else "int4", out, scales, zeros, self._group).dense()

    def _struct(self, data: Tensor | None, bias: Tensor | None) -> PackedStruct:
        pointers = (None if each is None else pointer(each) for each in (data, bias, self.scales, self.zeros))
        return PackedStruct(*pointers, self._kind, self.inputs, self.outputs, self._group)


Biased = tuple[NativeWeight, Tensor | None]  # a weight and its bias


def _padded(values: Tensor) -> Tensor:
    """[groups, out], padded to whole groups of outputs."""
    return F.pad(values, (0, -values.shape[1] % _GROUP)).contiguous()


def native_linear(x: Tensor, weight: NativeWeight, bias: Tensor | None) -> Tensor:
    """x [rows, in] @ weight^T + bias -> [rows, out], in the dtype of x. The sums are float32."""
    full, added = floats(x), None if bias is None else floats(bias)
    out = empty(len(full), weight.outputs)
    packed = weight.struct(added)
    functions().eagle_linear(session(), byref(packed), pointer(full), len(full), pointer(out))
    return out.to(x.dtype)
