"""Tensor parallelism: each rank's share of a decoder's layers, and the slices of a checkpoint that it reads.

    split by                 tensors                                    what is summed
    attention heads          q, k, v, g, q_b, kv_b, sinks by    the output of attention
                             rows; o by columns
    key heads                q, k, v and z, gates, convolution by       that of a recurrent layer
                             rows; out by columns
    width                    gate, up by rows; down by columns          that of an MLP, or of a mixture of experts
    vocabulary               embedding and lm_head by rows              the embeddings; logits are gathered

Every expert is split by its width, so that all ranks have equal work for any routing. KV heads are replicated where
there are fewer of them than ranks. Attention, recurrent layers, MLPs or experts are replicated as a whole where their
heads or width do not divide. The vocabulary is padded. Norms, routers and MLA's compressed KV are replicated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.cache.pool import KVShape
from eagle_server.models.checkpoints.weights import QuantizedTensor, StoredTensor, Weights
from eagle_server.models.config import CheckpointError, ModelConfig, SharedKV, Split, State
from eagle_server.models.ranks import RankGroup
from eagle_server.ops.linear.blocks import BlockWeight
from eagle_server.ops.linear.quantize import QuantizedWeight
from eagle_server.ops.recurrent.nodes import RecurrentShape

_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_LAYER = re.compile(
    r"model\.layers\.(\d+)\.(?:(self_attn|linear_attn|mlps?)\.)?((?:shared_)?experts?\.)?(?:\d+\.)?(\w+?)(?:\.(weight|bias))?"
)
_KV, _OUTPUTS = ("k_proj", "v_proj"), ("o_proj", "down_proj", "out_proj")
_QKV = ("in_proj_qkv", "conv1d")  # of recurrent layers: all of q, all of k, all of v
_BY_ROWS = (
    *("q_proj", "g_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "sinks", *_KV),
    *("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias"),
)


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """Heads and widths of one of `size` ranks. What does not divide stays whole."""
    heads, kv_heads, width, moe = config.num_heads, config.num_kv_heads, config.intermediate_size, config.moe
    layer_heads, recurrent = config.layer_heads, config.recurrent
    every = {kv_heads, *(shape.kv_heads for shape in config.pool_layers if isinstance(shape, KVShape))}
    divides = config.mla is not None or all(n % size == 0 or size % n == 0 for n in every)
    divides = divides and all(n % size == 0 for n in (heads, *layer_heads))
    if divides:
        heads, kv_heads = heads // size, max(1, kv_heads // size)
        layer_heads = tuple(n // size for n in layer_heads)
    shares = (size if divides else 1, size if recurrent is not None and recurrent.key_heads % size == 0 else 1)
    states = tuple(tuple(_state_of_one(state, *shares) for state in layer) for layer in config.states)
    if width % size == 0:
        width //= size
    if moe is not None and moe.intermediate_size % size == 0:
        moe = replace(moe, intermediate_size=moe.intermediate_size // size)
    sizes = {"num_heads": heads, "layer_heads": layer_heads, "num_kv_heads": kv_heads, "intermediate_size": width}
    return replace(config, **sizes, states=states, moe=moe)  # type: ignore[arg-type]


def _state_of_one(state: State, kv_shares: int, recurrent_shares: int) -> State:
    """What one rank has of a layer's KV, or of its state."""
    if isinstance(state, RecurrentShape):
        keys, values = state.key_heads // recurrent_shares, state.value_heads // recurrent_shares
        return replace(state, key_heads=keys, value_heads=values)
    if isinstance(state, SharedKV):
        return state._replace(shape=KVShape(max(1, state.shape.kv_heads // kv_shares), state.shape.head_dim))
    return KVShape(max(1, state.kv_heads // kv_shares), state.head_dim) if isinstance(state, KVShape) else state


def split_over(config: ModelConfig, ranks: RankGroup) -> ModelConfig:
    """The config of one rank of at least two."""
    share = share_of(config, ranks.size)
    split = Split(
        ranks,
        attention=share.num_heads < config.num_heads,
        mlp=share.intermediate_size < config.intermediate_size,
        experts=share.moe != config.moe,
        recurrent=share.recurrent != config.recurrent,
    )
    return replace(share, split=split)


def replicated(config: ModelConfig) -> str:
    """What a config of `split_over` could not split, for people; "": all is split."""
    split = config.split
    assert split is not None
    whole = {
        "attention heads": not split.attention,
        "recurrent layers": config.recurrent is not None and not split.recurrent,
        "of the MLPs": not split.mlp,
        "experts": config.moe is not None and not split.experts,
    }
    return ", ".join(part for part, is_whole in whole.items() if is_whole)


def own_slices(stored: Weights, whole: ModelConfig, split: Split) -> Weights:
    """The tensors of a checkpoint as one rank holds them. Only its slices will be read."""
    return {name: _own(name, tensor, whole, split) for name, tensor in stored.items()}


def _own(name: str, tensor: StoredTensor, whole: ModelConfig, split: Split) -> StoredTensor:
    rank, size = split.ranks.rank, split.ranks.size
    if name in _VOCABULARY:
        return slice_of(tensor, 0, rank, size)
    match = _LAYER.fullmatch(name)
    layer, block, expert, part, kind = ("0", "", "", "", "") if match is None else match.groups()
    dense = {"self_attn": split.attention, "linear_attn": split.recurrent, "mlp": split.mlp, "mlps": split.mlp}
    is_split = split.experts if expert else dense.get(block, False)
    if is_split and part in _BY_ROWS:
        shares = min(size, whole.kv_shape(int(layer)).kv_heads) if part in _KV else size
        return slice_of(tensor, 0, rank * shares // size, shares)
    if is_split and part in _QKV and whole.recurrent is not None:
        return _rows_of_each(tensor, whole.recurrent.sections, rank, size)
    if is_split and part in _OUTPUTS and kind == "weight":
        return slice_of(tensor, 1, rank, size)
    if is_split and part in _OUTPUTS and rank > 0:  # the sum has the bias of rank 0
        return replace(tensor, read=lambda: torch.zeros(tensor.shape, device="cpu"))
    return tensor


def slice_of(tensor: StoredTensor, dim: int, number: int, shares: int) -> StoredTensor:
    """One of equal shares of a tensor's dimension. If they are not equal, the last ones end with zeros."""
    if dim >= len(tensor.shape):
        return tensor  # refused later, for its shape
    full = tensor.shape[dim]
    length = -(-full // shares)
    first, last = min(number * length, full), min((number + 1) * length, full)
    shape = (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
    where = (*[slice(None)] * dim, slice(first, last))

    def read() -> Tensor:
        part = tensor.read_part(where)
        missing = length - (last - first)
        return F.pad(part, (0, 0) * (part.dim() - 1 - dim) + (0, missing)) if missing else part

    def load() -> QuantizedWeight | BlockWeight | Tensor:
        assert isinstance(tensor, QuantizedTensor)
        if last - first < length:
            return read()  # with its zeros, in floating point
        weight = tensor.load()
        if isinstance(weight, Tensor):
            return weight[where]
        part = weight.rows(slice(first, last)) if dim == 0 else weight.columns(first, last)
        if isinstance(weight, BlockWeight):
            return weight.dense()[where] if part is None else part
        if part is None and weight.quantization == "fp8":
            return weight.dense()[where]  # as where no kernel computes fp8
        if part is None:
            raise CheckpointError(
                f"{tensor.file}: {tensor.key}: quantized in groups of {weight.group} of its {full} inputs, which do "
                f"not divide over --tp-size {shares}"
            )
        return part

    if isinstance(tensor, QuantizedTensor):
        return QuantizedTensor(tensor.file, tensor.key, shape, read, load=load)
    return StoredTensor(tensor.file, tensor.key, shape, read)


def _rows_of_each(tensor: StoredTensor, sections: Sequence[int], number: int, shares: int) -> StoredTensor:
    """One of equal shares of each section of a tensor's rows."""
    if tensor.shape[0] != sum(sections):
        return tensor  # refused later, for its shape
    lengths = [rows // shares for rows in sections]
    firsts = [end - rows + number * rows // shares for end, rows in zip(accumulate(sections), sections, strict=True)]
    parts = [slice(first, first + length) for first, length in zip(firsts, lengths, strict=True)]
    shape = (sum(lengths), *tensor.shape[1:])

    def read() -> Tensor:
        return torch.cat([tensor.read_part((rows,)) for rows in parts])

    def load() -> QuantizedWeight | BlockWeight | Tensor:
        assert isinstance(tensor, QuantizedTensor)
        weight = tensor.load()
        if isinstance(weight, Tensor):
            return torch.cat([weight[rows] for rows in parts])
        if isinstance(weight, BlockWeight):
            return BlockWeight.stacked([weight.rows(rows) for rows in parts])
        return QuantizedWeight.stacked([weight.rows(rows) for rows in parts])

    if isinstance(tensor, QuantizedTensor):
        return QuantizedTensor(tensor.file, tensor.key, shape, read, load=load)
    return StoredTensor(tensor.file, tensor.key, shape, read)
