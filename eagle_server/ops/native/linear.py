"""Linear layers by the native kernels: packed weights, in 32, 16, 8 or 4 bits, or in the blocks of GGUF files."""

from __future__ import annotations

from copy import copy
from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.linear.blocks import FORMATS, BlockWeight
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight
from eagle_server.ops.native.library import empty, floats, functions, pointer, session
from eagle_server.ops.native.structs import PackedStruct

_FLOAT32, _HALVED, _BFLOAT16, _INT8, _INT4, _MXFP4, _GGUF = range(7)  # Kind in packed.h
_KINDS: dict[Quantization, int] = {"int8": _INT8, "int4": _INT4, "mxfp4": _MXFP4}
OUTPUTS_TOGETHER = 16  # outputs that are packed together
_BLOCK_GROUP = 32  # inputs of a row that share a scale, where weights are in blocks
CACHE_LINE = 64  # bytes


class NativeWeight:
    """A weight [out, in] packed for the native kernels. A tied embedding is a copy of its own.

    float32 weights that bfloat16 holds exactly, as those of most checkpoints, take half the memory.
    """

    def __init__(self, weight: Tensor | QuantizedWeight | BlockWeight) -> None:
        """Pack a weight. Parts of a BlockWeight must be `packable`."""
        self.scales: Tensor | None = None
        self.zeros: Tensor | None = None
        self._places: Tensor | None = None
        self._formats: Tensor | None = None
        self._order: Tensor | None = None
        self._group = 0
        if isinstance(weight, BlockWeight):
            self._pack_blocks(weight)
            return
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

    def _pack_blocks(self, weight: BlockWeight) -> None:
        """Each 16 outputs have records of their own, whose sizes follow from their format."""
        self.dtype, self._kind, self._group = torch.float32, _GGUF, _BLOCK_GROUP
        self._order = None if weight.order is None else weight.order.to("cpu", torch.int32)
        (outputs, self.inputs), places, formats = weight.shape, [0], []
        for part in weight.parts:
            number, groups = FORMATS[part.format].number, -(-len(part.blocks) // OUTPUTS_TOGETHER)
            size = functions().eagle_block_bytes(number, self.inputs)
            places += [places[-1] + (group + 1) * size for group in range(groups)]
            formats += [number] * groups
        all_places = torch.tensor(places, dtype=torch.int64, device="cpu")
        all_formats = torch.tensor(formats, dtype=torch.uint8, device="cpu")
        self.data, first = torch.empty(places[-1], dtype=torch.uint8, device="cpu"), 0
        for part in weight.parts:
            blocks, self.outputs = part.blocks.contiguous(), len(part.blocks)
            self._places, self._formats = all_places[first:], all_formats[first:]
            shape = self._struct(None, None)
            functions().eagle_pack(session(), byref(shape), pointer(blocks), pointer(self.data[places[first] :]))
            first += -(-self.outputs // OUTPUTS_TOGETHER)
        self._places, self._formats, self.outputs = all_places, all_formats, outputs

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
        weight._kind, weight._group, weight._places, weight._formats = _KINDS[quantization], group, None, None
        weight._order = None
        weight.outputs, weight.inputs = shape
        padded = (-(-weight.inputs // group), -(-weight.outputs // OUTPUTS_TOGETHER) * OUTPUTS_TOGETHER)
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
        assert first % OUTPUTS_TOGETHER == 0, "outputs are packed by 16"
        rest = copy(self)
        rest.outputs = self.outputs - first
        if self._places is not None and self._formats is not None:  # places stay those in all of `data`
            rest._places, rest._formats = (
                table[first // OUTPUTS_TOGETHER :] for table in (self._places, self._formats)
            )
            return rest
        groups = -(-self.outputs // OUTPUTS_TOGETHER)
        rest.data = self.data[self.data.nbytes // groups * (first // OUTPUTS_TOGETHER) :]
        rest.scales, rest.zeros = (x if x is None else x[:, first:].contiguous() for x in (self.scales, self.zeros))
        return rest

    def rows_until(self, count: int) -> NativeWeight:
        """The first `count` outputs, over the same memory. Rounded weights have a copy of the scales."""
        begin = copy(self)
        begin.outputs = count
        padded = -(-count // OUTPUTS_TOGETHER) * OUTPUTS_TOGETHER
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
        stored = halves if self.zeros is None else torch.uint8  # of blocks what they are multiplied out to
        out = torch.empty(self.outputs, self.inputs, dtype=stored, device="cpu")
        functions().eagle_unpack(session(), byref(self.struct(None)), pointer(out))
        if self._order is not None:
            out = out.unflatten(1, (-1, _BLOCK_GROUP))[:, self._order.argsort()].flatten(1)
        if self.zeros is None:
            return out.to(self.dtype)
        zeros = self.zeros[:, : self.outputs]
        if self.scales is None:
            scales = (zeros.int() << 23).view(torch.float32)
            return QuantizedWeight("mxfp4", out, scales, torch.zeros_like(zeros), self._group).dense()
        scales = self.scales[:, : self.outputs]
        return QuantizedWeight("int8" if self._kind == _INT8 else "int4", out, scales, zeros, self._group).dense()

    def _struct(self, data: Tensor | None, bias: Tensor | None) -> PackedStruct:
        each = (data, bias, self.scales, self.zeros, self._places, self._formats, self._order)
        first, second, *groups = (None if tensor is None else pointer(tensor) for tensor in each)
        sizes = (self._kind, self.inputs, self.outputs, self._group)
        return PackedStruct(first, second, *groups[:2], *sizes, *groups[2:])


def packable(weight: BlockWeight) -> bool:
    """Whether a weight can be packed: 16 outputs have one format."""
    return all(len(part.blocks) % OUTPUTS_TOGETHER == 0 for part in weight.parts[:-1])


Biased = tuple[NativeWeight, Tensor | None]  # a weight and its bias


def _padded(values: Tensor) -> Tensor:
    """[groups, out], padded to whole groups of outputs."""
    return F.pad(values, (0, -values.shape[1] % OUTPUTS_TOGETHER)).contiguous()


def native_linear(x: Tensor, weight: NativeWeight, bias: Tensor | None) -> Tensor:
    """x [rows, in] @ weight^T + bias -> [rows, out], in the dtype of x. The sums are float32."""
    full, added = floats(x), None if bias is None else floats(bias)
    out = empty(len(full), weight.outputs)
    packed = weight.struct(added)
    functions().eagle_linear(session(), byref(packed), pointer(full), len(full), pointer(out))
    return out.to(x.dtype)
