"""Recurrent layers by the native kernels: bit for bit the same for a token in a prompt, a plain step and a tree.

The torch twin is `ops.recurrent.nodes`. It computes the same numbers in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.native.library import check_inside, empty, floats, functions, pointer, session
from eagle_server.ops.native.structs import RecurrentStruct, SequencesStruct
from eagle_server.ops.recurrent.nodes import RULES, RecurrentLayer, RecurrentShape

_LARGEST_KERNEL = 16


class NativeSequences:
    """The rows of each request of a forward, as the kernels read them: trees by `parents`, or chunks by `starts`."""

    def __init__(
        self,
        ends: Tensor,
        requests: Tensor,
        *,
        starts: Tensor | None = None,
        parents: Tensor | None = None,
        saved: Sequence[tuple[int, int]] = (),
    ) -> None:
        """ends: int64 [bs], the row after each request's last. requests: int64 [bs], rows of the pool.

        starts: int64 [bs], first positions of chunks. parents: int64 [bs, D] of trees. saved: rows of the pool, each
        with the one that its state is copied to after the chunks.
        """
        indptr, copies = F.pad(ends, (1, 0)).to(torch.int32), torch.tensor(saved, dtype=torch.int64)
        given = (indptr, requests, starts, parents, copies)
        self._kept = [None if each is None else each.contiguous() for each in given]
        pointers = (None if each is None else pointer(each) for each in self._kept)
        width = 0 if parents is None else parents.shape[1]
        self.struct = SequencesStruct(*pointers, len(requests), width, len(saved))


def structs_of(groups: Sequence[NativeSequences]) -> Array[SequencesStruct]:
    """For the kernels, as long as the groups live."""
    return (SequencesStruct * len(groups))(*(group.struct for group in groups))


class NativeStates:
    """The tensors of a `StatePool`, as the kernels read and write them."""

    def __init__(self, shape: RecurrentShape, parts: Sequence[Tensor]) -> None:
        """parts: states, rings, inputs, keys, updates and decays of the pool, by layer."""
        self._shape, self._parts = shape, tuple(parts)
        self._weights: dict[int, tuple[Tensor, ...]] = {}
        layers = range(len(parts[0]))
        self._layers = (RecurrentStruct * len(layers))(*(self._struct(layer) for layer in layers))

    @staticmethod
    def fits(shape: RecurrentShape) -> bool:
        """Whether the kernels compute this shape."""
        return shape.kernel <= _LARGEST_KERNEL

    def run(self, x: Tensor, gates: Tensor, layer: RecurrentLayer, groups: Sequence[NativeSequences]) -> Tensor:
        """See `RecurrentRows.run`. The result is float32."""
        struct, sequences = self._with_weights(layer), structs_of(groups)
        rows, rates = floats(x.to(self._parts[1].dtype)), floats(gates)
        out = empty(len(x), self._shape.value_heads, self._shape.value_dim)
        places = map(pointer, (rows, rates, out))
        outside = functions().eagle_recur(session(), byref(struct), sequences, len(sequences), *places)
        check_inside(outside=bool(outside))
        return out

    def address(self, layer: RecurrentLayer) -> c_void_p:
        """Of a layer's structure, as long as this object lives."""
        return c_void_p(addressof(self._with_weights(layer)))

    def keep(self, path: Tensor, requests: Tensor) -> None:
        """See `StatePool.keep`."""
        path, requests = path.contiguous(), requests.contiguous()
        sizes = (len(path), path.shape[1], self._parts[2].shape[1])
        outside = functions().eagle_keep_states(
            session(), self._layers, len(self._layers), pointer(path), pointer(requests), *sizes
        )
        check_inside(outside=bool(outside))

    def _with_weights(self, layer: RecurrentLayer) -> RecurrentStruct:
        struct: RecurrentStruct = self._layers[layer.index]
        if layer.index not in self._weights:  # copies as the kernels read them, made once
            weights = {name: getattr(layer, name) for name in ("conv", "a_log", "dt_bias", "conv_bias", "skip")}
            kept = {name: floats(each.detach().t()) for name, each in weights.items() if each is not None}
            self._weights[layer.index] = tuple(kept.values())
            for name, weight in kept.items():
                setattr(struct, name, pointer(weight))
        return struct

    def _struct(self, layer: int) -> RecurrentStruct:
        shape = self._shape
        sizes = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.kernel)
        is_bf16, nodes = self._parts[1].dtype == torch.bfloat16, self._parts[2].shape[2]
        places = (pointer(part[layer]) for part in self._parts)
        rule = (RULES.index(shape.rule), *shape.steps)
        return RecurrentStruct(None, None, None, None, None, *places, is_bf16, *sizes, nodes, *rule)
