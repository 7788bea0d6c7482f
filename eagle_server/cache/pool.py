"""KV pools. Target and draft have separate buffers, addressed by the same slot ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eagle_server.ops.device import mirrors
from eagle_server.ops.kv.move import keep_accepted


class KVShape(NamedTuple):
    """The keys of one token in one layer, and its values: [kv_heads, head_dim] each."""

    kv_heads: int
    head_dim: int


class LatentShape(NamedTuple):
    """The compressed KV of one token in one layer, and the rotary part of its key, which all heads share."""

    rank: int
    rope_dim: int


Shape = KVShape | LatentShape


class Pool(Protocol):
    """Per layer: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers."""
        ...

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [rows, kv_heads, *] in `slots` int64 [rows]."""
        ...

    def keep(self, path: Tensor, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor) -> None:
        """Move accepted nodes to the front of their windows in every layer, see `ops.kv.move.keep_accepted`."""
        ...

    def clear(self, slots: Tensor) -> None:
        """Fill `slots` int64 [n] with zeros, so that a masked read of them is harmless."""
        ...

    def poison(self, slots: Tensor) -> None:
        """Fill `slots` int64 [n] with NaN, so that tests detect a read of unwritten KV."""
        ...


class KVPool:
    """Keys and values of layers of any shapes. The page of slot 0 is padding.

    groups: [2, n, slots, kv_heads, head_dim] of the n layers of each shape. In a CPU's memory each head's slots follow
    each other, because its threads read one head after the other. On a GPU the heads of a slot do.
    """

    def __init__(self, layers: Sequence[KVShape], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        # Not zeroed, so that unused memory is never touched. Only slot 0 is zeroed: padding reads it under a mask.
        self._slot_dim, groups = 2 if mirrors(device) else 3, []  # of a group in memory
        for shape in dict.fromkeys(layers):
            sizes = [2, layers.count(shape), *shape]
            sizes.insert(self._slot_dim, slots)
            groups.append(torch.empty(sizes, dtype=dtype, device=device).transpose(2, self._slot_dim))
        self.groups = tuple(groups)
        for group in self.groups:
            group[:, :, 0].zero_()
        planes = {KVShape(*group.shape[3:]): iter(group.unbind(1)) for group in self.groups}
        pairs = [next(planes[KVShape(*shape)]).unbind(0) for shape in layers]
        self.keys, self.values = (tuple(side) for side in zip(*pairs, strict=True))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def keep(self, path: Tensor, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor) -> None:
        for group in self.groups:
            memory = group.transpose(2, self._slot_dim)
            keep_accepted(memory, self._slot_dim, path, seq_lens, req_pool_indices, req_to_token)

    def clear(self, slots: Tensor) -> None:
        for group in self.groups:
            group.index_fill_(2, slots, 0)

    def poison(self, slots: Tensor) -> None:
        for group in self.groups:
            group.index_fill_(2, slots, float("nan"))

    @property
    def bytes_per_slot(self) -> int:
        return sum(group[:, :, 0].nbytes for group in self.groups)


class LatentPool:
    """The compressed KV of multi-head latent attention: `data` [layers, slots, rank + rope_dim].

    All heads share one key: the latent, followed by the rotary part. Their value is the latent, a view of the key.
    """

    def __init__(self, layers: Sequence[LatentShape], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        (shape,) = set(layers)
        self.rank = rank = shape.rank
        self.data = torch.empty(len(layers), slots, sum(shape), dtype=dtype, device=device)
        self.data[:, 0].zero_()
        self.keys = tuple(layer[:, None] for layer in self.data.unbind(0))
        self.values = tuple(layer[:, None, :rank] for layer in self.data.unbind(0))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[layer].index_copy_(0, slots, k)

    def keep(self, path: Tensor, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor) -> None:
        keep_accepted(self.data, 1, path, seq_lens, req_pool_indices, req_to_token)

    def clear(self, slots: Tensor) -> None:
        self.data.index_fill_(1, slots, 0)

    def poison(self, slots: Tensor) -> None:
        self.data.index_fill_(1, slots, float("nan"))

    @property
    def bytes_per_slot(self) -> int:
        return self.data[:, 0].nbytes


def pool_of(layers: Sequence[Shape], slots: int, dtype: torch.dtype, device: torch.device) -> KVPool | LatentPool:
    """The pool of layers that keep this of each token: all keys and values, or all latents."""
    latents = [layer for layer in layers if isinstance(layer, LatentShape)]
    if latents:
        assert len(latents) == len(layers), "latents beside keys and values"
        return LatentPool(latents, slots, dtype, device)
    return KVPool([layer for layer in layers if isinstance(layer, KVShape)], slots, dtype, device)
