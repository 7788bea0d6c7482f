"""Tensor parallelism: each rank's share of a decoder's layers, and the slices of a checkpoint that it reads.

    split by                 tensors                                    what is summed
    attention heads          q, k, v, q_b, kv_b by rows; o by columns   the output of attention
    width                    gate, up by rows; down by columns          that of an MLP, or of a mixture of experts
    vocabulary               embedding and lm_head by rows              the embeddings; logits are gathered

Every expert is split by its width, so that all ranks have equal work for any routing. KV heads are replicated where
there are fewer of them than ranks. Attention, MLPs or experts are replicated as a whole where their heads or width do
not divide. The vocabulary is padded. Norms, routers and MLA's compressed KV are replicated.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.models.checkpoints.quantized import QuantizedTensor
from eagle_server.models.checkpoints.weights import StoredTensor, Weights
from eagle_server.models.config import CheckpointError, ModelConfig, Split
from eagle_server.models.ranks import RankGroup
from eagle_server.ops.quantize import QuantizedWeight

_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_LAYER = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.((?:shared_)?experts\.)?(?:\d+\.)?(\w+)\.(weight|bias)")
_KV, _OUTPUTS = ("k_proj", "v_proj"), ("o_proj", "down_proj")
_BY_ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", *_KV)


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """Heads and widths of one of `size` ranks. What does not divide stays whole."""
    heads, kv_heads, width, moe = config.num_heads, config.num_kv_heads, config.intermediate_size, config.moe
    if heads % size == 0 and (config.mla is not None or kv_heads % size == 0 or size % kv_heads == 0):
        heads, kv_heads = heads // size, max(1, kv_heads // size)
    if width % size == 0:
        width //= size
    if moe is not None and moe.intermediate_size % size == 0:
        moe = replace(moe, intermediate_size=moe.intermediate_size // size)
    return replace(config, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=width, moe=moe)


def split_over(config: ModelConfig, ranks: RankGroup) -> ModelConfig:
    """The config of one rank of at least two."""
    share = share_of(config, ranks.size)
    split = Split(
        ranks,
        attention=share.num_heads < config.num_heads,
        mlp=share.intermediate_size < config.intermediate_size,
        experts=share.moe != config.moe,
    )
    return replace(share, split=split)


def replicated(config: ModelConfig) -> str:
    """What a config of `split_over` could not split, for people; "": all is split."""
    split = config.split
    assert split is not None
    whole = {
        "attention heads": not split.attention,
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
        return _slice_of(tensor, 0, rank, size)
    match = _LAYER.fullmatch(name)
    block, expert, part, kind = ("", "", "", "") if match is None else match.groups()
    is_split = {"": False, "self_attn": split.attention, "mlp": split.experts if expert else split.mlp}[block]
    if not is_split:
        return tensor
    if part in _BY_ROWS:
        shares = min(size, whole.num_kv_heads) if part in _KV else size
        return _slice_of(tensor, 0, rank * shares // size, shares)
    if part in _OUTPUTS and kind == "weight":
        return _slice_of(tensor, 1, rank, size)
    if part in _OUTPUTS and rank > 0:  # the sum has the bias of rank 0
        return replace(tensor, read=lambda: torch.zeros(tensor.shape))
    return tensor


def _slice_of(tensor: StoredTensor, dim: int, number: int, shares: int) -> StoredTensor:
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

    def load() -> QuantizedWeight | Tensor:
        assert isinstance(tensor, QuantizedTensor)
        if last - first < length:
            return read()  # with its zeros, in floating point
        weight = tensor.load()
        if isinstance(weight, Tensor):
            return weight[where]
        part = weight.rows(first, last) if dim == 0 else weight.columns(first, last)
        if part is None:
            raise CheckpointError(
                f"{tensor.file}: {tensor.key}: quantized in groups of {weight.group} of its {full} inputs, which do "
                f"not divide over --tp-size {shares}"
            )
        return part

    if isinstance(tensor, QuantizedTensor):
        return QuantizedTensor(tensor.file, tensor.key, shape, read, load=load)
    return StoredTensor(tensor.file, tensor.key, shape, read)
