"""The states of recurrent layers: one per request, at its row of the page table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.ops.native.library import available
from eagle_server.ops.native.recurrent import NativeStates
from eagle_server.ops.recurrent.kernels import computed, keep_paths
from eagle_server.ops.recurrent.nodes import RecurrentNodes, RecurrentShape, after_path


class StatePool:
    """The state of each request's text, and what the nodes of its newest tree left behind.

    A forward over trees changes no state: it stores its nodes, and `keep` moves the states along the accepted paths.
    So a forward that was computed for nothing leaves no trace. Row `rows` is for padding. The rows after it are
    checkpoints for the prefix cache: copies of states, which have no nodes.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        nodes: int,
        shape: RecurrentShape,
        dtype: torch.dtype,
        device: torch.device,
        checkpoints: int = 0,
    ) -> None:
        """nodes: of the largest tree. dtype: of the convolution's inputs; all others are float32."""
        wide = torch.promote_types(dtype, torch.float32)

        def empty(*sizes: int, count: int = rows + 1, dtype: torch.dtype = wide) -> Tensor:
            return torch.empty(layers, count, *sizes, dtype=dtype, device=device)

        self.shape, self.pad_row, count = shape, rows, rows + 1 + checkpoints
        self.states = empty(shape.value_heads, shape.key_dim, shape.value_dim, count=count)
        self.rings = empty(shape.kernel - 1, shape.channels, count=count, dtype=dtype)
        self.inputs = empty(nodes, shape.channels, dtype=dtype)
        self.keys = empty(nodes, shape.key_heads, shape.key_dim)
        self.updates = empty(nodes, shape.value_heads, shape.update_dim)
        self.decays = empty(nodes, shape.decays)
        self.parts = (self.states, self.rings, self.inputs, self.keys, self.updates, self.decays)
        self.native = NativeStates(shape, self.parts) if available(device, dtype) and NativeStates.fits(shape) else None
        self.states[:, rows].zero_()
        self.rings[:, rows].zero_()

    def read(self, layer: int, requests: Tensor) -> tuple[Tensor, Tensor]:
        """States [bs, value_heads, K, V] and last inputs [bs, kernel - 1, channels] of these rows, int64 [bs]."""
        return self.states[layer].index_select(0, requests), self.rings[layer].index_select(0, requests)

    def store(self, layer: int, requests: Tensor, nodes: RecurrentNodes) -> None:
        """Store the nodes of a tree per request."""
        size = nodes.keys.shape[1]
        for place, values in self._node_parts(layer, nodes):
            place[:, :size].index_copy_(0, requests, values.to(place.dtype))

    def keep(self, path: Tensor, requests: Tensor) -> None:
        """Move the states of these rows, int64 [bs], along their paths, int64 [bs, w], -1 after their ends."""
        if self.native is not None:
            self.native.keep(path, requests)
            return
        if computed(self.states, self.shape):
            keep_paths(path, requests, self.shape, self.parts)
            return
        lengths, rows = (path >= 0).sum(1), requests[:, None]
        nodes = path.clamp(min=0)
        for layer in range(len(self.states)):
            inputs, keys, updates, decays = (
                part[layer][rows, nodes] for part in (self.inputs, self.keys, self.updates, self.decays)
            )
            state, ring = after_path(
                *self.read(layer, requests), RecurrentNodes(inputs, keys, updates, decays), lengths
            )
            self.states[layer].index_copy_(0, requests, state)
            self.rings[layer].index_copy_(0, requests, ring)

    def copy(self, rows: Sequence[tuple[int, int]], layer: int | None = None) -> None:
        """Copy states in one layer or in all, each (from this row, to that row). No row is copied to twice."""
        sources, targets = upload(rows, self.states.device).unbind(1)
        for values in (self.states, self.rings):
            part = values if layer is None else values[layer : layer + 1]
            part.index_copy_(1, targets, part.index_select(1, sources))

    def poison(self, rows: Sequence[int] | None = None) -> None:
        """Fill states with NaN, by default all but the padding's. So tests notice that a text begins with another's."""
        if rows is None:
            rows = [row for row in range(self.states.shape[1]) if row != self.pad_row]
        for values in (self.states, self.rings):
            values[:, list(rows)] = float("nan")

    def _node_parts(self, layer: int, nodes: RecurrentNodes) -> list[tuple[Tensor, Tensor]]:
        return [
            (self.inputs[layer], nodes.inputs),
            (self.keys[layer], nodes.keys),
            (self.updates[layer], nodes.updates),
            (self.decays[layer], nodes.decays),
        ]

    @staticmethod
    def bytes_per_request(layers: int, shape: RecurrentShape, dtype: torch.dtype) -> int:
        """Bytes of one request's state, all layers together."""
        state = 4 * shape.value_heads * shape.key_dim * shape.value_dim
        return layers * (state + (shape.kernel - 1) * shape.channels * dtype.itemsize)

    @staticmethod
    def bytes_per_node(layers: int, shape: RecurrentShape, dtype: torch.dtype) -> int:
        """Bytes of one node of a request's tree, all layers together."""
        floats = shape.key_heads * shape.key_dim + shape.value_heads * shape.update_dim + shape.decays
        return layers * (4 * floats + shape.channels * dtype.itemsize)
