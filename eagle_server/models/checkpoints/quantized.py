"""Checkpoints with quantized linear layers: GPTQ, AWQ, compressed-tensors (int4, int8, fp8), FP8 in blocks and MXFP4.

A layer is stored as several tensors, which are listed here as one weight. Native kernels take its integers as they are.
All others, and the kinds that no kernel computes, get (codes - zeros) * scales in floating point.

    GPTQ                   qweight int32 [in / 8, out], qzeros [groups, out / 8] (less 1), scales [groups, out], g_idx
    AWQ                    qweight int32 [in, out / 8], qzeros [groups, out / 8], in an order of their own, scales
    pack-quantized         weight_packed int32 [out, in / 8], weight_scale [out, groups], weight_zero_point
    int-, float-quantized  weight int8 or float8 [out, in], weight_scale [out, 1], [1] or [out / b, in / b]
    FP8                    weight float8 [out, in], weight_scale_inv [out / b, in / b]
    MXFP4                  experts only: see `fused_experts`, which also splits experts that are stored together

Sources: the packing code of AutoGPTQ 0.7, AutoAWQ 0.2 and compressed-tensors 0.20, and DeepSeek-V3's checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eagle_server.models.checkpoints.fused_experts import single_experts
from eagle_server.models.checkpoints.weights import QuantizedTensor, StoredTensor, Weights, some_of
from eagle_server.models.config import CheckpointError
from eagle_server.models.config_json import LARGEST_SIZE
from eagle_server.models.layers import Linear, linear_views
from eagle_server.ops.linear.blocks import BlockWeight
from eagle_server.ops.linear.fp8_rows import FP8
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight
from eagle_server.ops.native.linear import packable

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs of a word stand in it
_UNUSED = ("input_scale", "output_scale", "k_scale", "v_scale", "input_zero_point")  # of activations and KV
_BITS = (4, 8)
_INT8_ZERO = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantized:
    """How a checkpoint is quantized. group: inputs of a scale, 0: all. offset: what is added to stored zeros."""

    method: str
    bits: int
    group: int
    offset: int = 0
    block: tuple[int, int] | None = None


Parts = dict[str, StoredTensor]  # of one layer, by the last part of their names


def with_dequantized(stored: Weights, raw: Mapping[str, Any], source: str) -> Weights:
    """The tensors of a checkpoint, with one `QuantizedTensor` for all parts of a quantized weight, and single experts.

    Args:
        raw: config.json.

    Raises:
        CheckpointError: a method, number of bits or strategy that is not supported, or a part is missing.
    """
    scheme, stored = read_quantization(raw, source), single_experts(stored)
    if scheme is None or scheme.method == "mxfp4":
        return stored
    layers: dict[str, Parts] = {}
    for name, tensor in stored.items():
        base, _, part = name.rpartition(".")
        layers.setdefault(base, {})[part] = tensor
    weights: Weights = {}
    for base, parts in layers.items():
        parts = {part: tensor for part, tensor in parts.items() if part not in _UNUSED}
        if (weight := _weight_of(parts, scheme)) is not None:
            weights[f"{base}.weight"] = weight
        weights |= {f"{base}.{part}" if base else part: tensor for part, tensor in parts.items()}
    return weights


def read_quantization(raw: Mapping[str, Any], source: str) -> Quantized | None:
    """How the checkpoint is quantized; None: it is not.

    Raises:
        CheckpointError: in a way that is not supported.
    """
    config = raw.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    where = f"{source}: quantization_config"
    if method == "compressed-tensors":
        return _compressed_tensors(config, where)
    if method == "fp8":
        return Quantized("fp8", 8, 0, block=_block(config.get("weight_block_size"), f"{where}.weight_block_size"))
    if method == "mxfp4":  # other modules have no blocks, so the list of them only has to be one
        if not _is_list_of_names(config.get("modules_to_not_convert")):
            raise CheckpointError(f"{where}.modules_to_not_convert: a list of names is expected")
        return Quantized("mxfp4", 4, 32)
    if method not in ("gptq", "awq"):
        known = "gptq, awq, compressed-tensors, fp8 and mxfp4"
        raise CheckpointError(f"{where}: {method} is not supported; known are {known}")
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size", 128))
    if bits not in (_BITS if method == "gptq" else (4,)) or type(group) is not int or not -1 <= group <= LARGEST_SIZE:
        raise CheckpointError(f"{where}: {method} with {bits} bits in groups of {group} is not supported")
    if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        raise CheckpointError(f"{where}: AWQ's layout {config['version']} is not supported, gemm is")
    older = method == "gptq" and config.get("checkpoint_format", "gptq") == "gptq"
    return Quantized(method, bits, max(group, 0), offset=int(older))


def _is_list_of_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _compressed_tensors(config: Mapping[str, Any], where: str) -> Quantized:
    groups = list(_object(config, "config_groups", where).values())
    if not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError(f"{where}.config_groups: objects are expected, found {groups}")
    weights = [_object(group, "weights", where) for group in groups]
    kinds = [[w.get(key) for key in ("num_bits", "type", "strategy", "group_size")] for w in weights]
    if not kinds or any(other != kinds[0] for other in kinds):
        raise CheckpointError(f"{where}: one group of weights is supported, found {len(kinds)}")
    bits, kind, strategy, group = kinds[0]
    if bits not in _BITS or kind not in ("int", "float") or (kind == "float" and bits != 8):  # noqa: PLR2004
        raise CheckpointError(f"{where}: {kind} weights of {bits} bits are not supported; int4, int8 and fp8 are")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise CheckpointError(f"{where}: the strategy {strategy} is not supported")
    if strategy != "group":
        group = 0
    elif type(group) is not int or not 1 <= group <= LARGEST_SIZE:
        raise CheckpointError(f"{where}: the strategy group needs a positive group_size, found {group}")
    block = _block(weights[0].get("block_structure"), f"{where}.block_structure")
    return Quantized("compressed-tensors", bits, group, block=block)


def _object(raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The object under a key; absent or null: an empty one."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {key} must be an object, found {value!r}")
    return value or {}


def _block(sizes: Any, where: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale."""
    if sizes is None:
        return None
    if not isinstance(sizes, list) or [type(size) for size in sizes] != [int, int] or min(sizes) < 1:
        raise CheckpointError(f"{where}: two positive integers are expected, found {sizes}")
    return sizes[0], sizes[1]


def _weight_of(parts: Parts, scheme: Quantized) -> QuantizedTensor | None:
    """The weight whose parts these are. They are removed from `parts`. None: it is not quantized."""
    shape: tuple[int, ...]
    if scheme.method in ("gptq", "awq") and "qweight" in parts:
        rows, columns = parts["qweight"].shape
        per_word = 32 // scheme.bits
        shape = (columns, rows * per_word) if scheme.method == "gptq" else (columns * per_word, rows)
        return _taken(
            parts, _gptq if scheme.method == "gptq" else _awq, shape, scheme, "qweight qzeros scales", "g_idx"
        )
    if "weight_packed" in parts:
        shape = _stored_shape(parts["weight_shape"]) if "weight_shape" in parts else ()
        optional = "weight_zero_point weight_g_idx"
        return _taken(parts, _packed, shape, scheme, "weight_packed weight_scale weight_shape", optional)
    scale = next((part for part in ("weight_scale", "weight_scale_inv") if part in parts), None)
    if scale is None or "weight" not in parts:
        return None
    return _taken(parts, _scaled, parts["weight"].shape, scheme, f"weight {scale}", "weight_zero_point")


def _stored_shape(stored: StoredTensor) -> tuple[int, ...]:
    """The numbers of a one-dimensional tensor of integers."""
    tensor = stored.read()
    if tensor.dim() != 1 or tensor.is_floating_point():
        raise CheckpointError(f"{stored.file}: {stored.key}: two integers are expected, found {tensor.tolist()}")
    return tuple(tensor.tolist())


Reader = Callable[[Mapping[str, Tensor], tuple[int, ...], Quantized], QuantizedWeight | Tensor]


def _taken(
    parts: Parts, reader: Reader, shape: tuple[int, ...], scheme: Quantized, needed: str, optional: str
) -> QuantizedTensor:
    missing = [part for part in needed.split() if part not in parts]
    first = parts[needed.split()[0]]
    if missing:
        raise CheckpointError(f"{first.file}: {first.key}: its {' and '.join(missing)} is missing")
    taken = {part: parts.pop(part) for part in (*needed.split(), *optional.split()) if part in parts}
    if len(shape) != 2:  # noqa: PLR2004  [out, in]
        raise CheckpointError(f"{first.file}: {first.key}: a weight has two dimensions, found {list(shape)}")

    def load() -> QuantizedWeight | Tensor:
        tensors = {part: tensor.read() for part, tensor in taken.items()}
        try:
            return reader(tensors, shape, scheme)
        except (RuntimeError, IndexError, ValueError) as error:  # shapes that do not fit each other
            sizes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in tensors.items())
            raise CheckpointError(f"{first.file}: {first.key}: the parts do not fit: {sizes} ({error})") from None

    return QuantizedTensor(first.file, first.key, shape, lambda: _dense(load()), load=load)


def _dense(weight: QuantizedWeight | BlockWeight | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense()


def _grouped(
    codes: Tensor, scales: Tensor, zeros: Tensor, g_idx: Tensor | None, scheme: Quantized
) -> QuantizedWeight | Tensor:
    """codes [out, in], scales and zeros [groups, out]. Groups of inputs that are not neighbours become floats."""
    inputs = codes.shape[1]
    group = scheme.group or inputs
    if (g_idx is None or int(g_idx.min()) < 0) and len(scales) != -(-inputs // group):
        raise RuntimeError(f"groups of {group} inputs need {-(-inputs // group)} rows of scales: group_size is wrong")
    in_order = torch.arange(inputs, device=codes.device) // group
    groups = in_order if g_idx is None or int(g_idx.min()) < 0 else g_idx.long()  # -1: not set
    scales = scales.float().contiguous()
    if zeros.shape != scales.shape or scales.shape[1] != len(codes):
        raise RuntimeError("scales and zeros have one row for each group")
    whole = scheme.bits == 4 or (len(scales) == 1 and bool((zeros == _INT8_ZERO).all()))  # noqa: PLR2004
    if groups.equal(in_order) and group % 8 == 0 and whole:
        kind: Quantization = "int4" if scheme.bits == 4 else "int8"  # noqa: PLR2004
        return QuantizedWeight(kind, codes.contiguous(), scales, zeros.to(torch.uint8).contiguous(), group)
    return (codes - zeros.float()[groups].t()) * scales[groups].t()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def _gptq(parts: Mapping[str, Tensor], shape: tuple[int, ...], scheme: Quantized) -> QuantizedWeight | Tensor:
    codes = _unpacked(parts["qweight"].t().contiguous(), scheme.bits)
    zeros = _unpacked(parts["qzeros"], scheme.bits)[:, : shape[0]].short() + scheme.offset  # 15 stands for 16
    return _grouped(codes, parts["scales"], zeros, parts.get("g_idx"), scheme)


def _awq(parts: Mapping[str, Tensor], shape: tuple[int, ...], scheme: Quantized) -> QuantizedWeight | Tensor:
    order = torch.arange(shape[0], device=parts["qweight"].device).view(-1, len(_AWQ_ORDER))[:, _AWQ_ORDER].flatten()
    codes, zeros = (_unpacked(parts[part], scheme.bits)[:, order] for part in ("qweight", "qzeros"))
    return _grouped(codes.t(), parts["scales"], zeros, None, scheme)


def _packed(parts: Mapping[str, Tensor], shape: tuple[int, ...], scheme: Quantized) -> QuantizedWeight | Tensor:
    codes, scales = _unpacked(parts["weight_packed"], scheme.bits)[:, : shape[1]], parts["weight_scale"]
    scales = scales.expand(1, shape[0]) if scales.numel() == 1 else scales.t()
    if (packed := parts.get("weight_zero_point")) is not None:
        zeros = _unpacked(packed.t().contiguous(), scheme.bits)[:, : shape[0]]
    else:
        zeros = torch.full_like(scales, 1 << (scheme.bits - 1), dtype=torch.uint8)
    return _grouped(codes, scales, zeros, parts.get("weight_g_idx"), scheme)


def _scaled(parts: Mapping[str, Tensor], shape: tuple[int, ...], scheme: Quantized) -> QuantizedWeight | Tensor:
    weight = parts["weight"]
    scale = (parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"]).float()
    if weight.is_floating_point() and weight.element_size() > 1:
        raise RuntimeError("the weight is not compressed; save the checkpoint compressed, or without scales")
    (rows, columns), block = shape, (1, scheme.group) if scheme.group else scheme.block
    group = columns
    if scale.numel() == 1 or scale.shape in ((rows,), (rows, 1)):
        scales = scale.reshape(-1, 1).expand(rows, 1)
    elif block is not None and scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
        scales, group = scale.repeat_interleave(block[0], 0)[:rows], block[1]
    else:
        raise RuntimeError(f"blocks of {block} need other scales")
    if weight.dtype == FP8:
        scales = scales.t().contiguous()  # [groups, out]
        return QuantizedWeight("fp8", weight, scales, torch.zeros_like(scales, dtype=torch.uint8), min(group, columns))
    if weight.dtype == torch.int8 and scales.shape[1] == 1 and "weight_zero_point" not in parts:
        codes = (weight.short() + _INT8_ZERO).to(torch.uint8)
        zeros = torch.full((1, rows), _INT8_ZERO, dtype=torch.uint8, device=weight.device)
        return QuantizedWeight("int8", codes, scales.t().contiguous(), zeros, columns)
    zero = parts.get("weight_zero_point")
    shifted = weight.float() if zero is None else weight.float() - zero.float().reshape(-1, 1)
    return shifted * scales.repeat_interleave(group, 1)[:, :columns]


@dataclass(frozen=True)
class Rounded:
    """A linear layer whose tensors are all quantized: `tensors` by name, and the layer's views of them, in order."""

    tensors: dict[str, QuantizedTensor]
    views: tuple[Tensor, ...]

    def __call__(self) -> QuantizedWeight | BlockWeight | None:
        """The integers, for native kernels; None: they do not compute these, and the layer holds floats now."""
        parts = [tensor.load() for tensor in self.tensors.values()]
        in_blocks = [each for each in parts if isinstance(each, BlockWeight)]
        if len(in_blocks) == len(parts):
            weight = BlockWeight.stacked(in_blocks)
            if packable(weight):
                return weight
            log.warning("%s: multiplied out: 16 outputs have several types", some_of(self.tensors))
        known = [each for each in parts if isinstance(each, QuantizedWeight)]
        if len(known) == len(parts) and len({(each.quantization, each.group) for each in known}) == 1:
            return QuantizedWeight.stacked(known)
        if in_blocks and known:
            log.warning("%s: multiplied out: no kernel computes their types in one layer", some_of(self.tensors))
        with torch.no_grad():
            for part, view in zip(parts, self.views, strict=True):
                view.copy_(_dense(part))
        return None


def without_added_biases(stored: Weights, expected: Iterable[str]) -> Weights:
    """The tensors without biases of zeros that the model does not have: some packers give one to every layer."""
    names = set(expected)
    added = {
        name
        for name, tensor in stored.items()
        if name.endswith(".bias")
        and name not in names
        and isinstance(stored.get(f"{name.removesuffix('.bias')}.weight"), QuantizedTensor)
        and not tensor.read().any()
    }
    return {name: tensor for name, tensor in stored.items() if name not in added}


def rounded_linears(model: nn.Module, views: Mapping[str, Tensor], stored: Weights) -> dict[Linear, Rounded]:
    """The linear layers whose tensors are all quantized. Their parameters need not be filled.

    Raises:
        CheckpointError: a tensor has another shape than its view.
    """
    rounded: dict[Linear, Rounded] = {}
    for linear, parts in linear_views(model, views).items():
        tensors = {name: tensor for name in parts if isinstance(tensor := stored[name], QuantizedTensor)}
        for name, tensor in tensors.items():
            if tensor.shape != parts[name].shape:
                shapes = f"expected shape {list(parts[name].shape)}, found {list(tensor.shape)}"
                raise CheckpointError(f"{tensor.file}: {tensor.key}: {shapes}")
        if 0 < len(tensors) < len(linear.parts):
            log.warning("%s: multiplied out: other weights of the layer are not quantized", some_of(tensors))
        if len(tensors) == len(linear.parts):
            rounded[linear] = Rounded(tensors, tuple(parts.values()))
    return rounded
