"""Checkpoint directories, local or from the Hugging Face Hub. Tensors are listed first, then read one by one."""

from __future__ import annotations

import json
import logging
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from eagle_server.algorithms import ALGORITHMS
from eagle_server.hub import HubError, hub_file, hub_snapshot
from eagle_server.models.checkpoints.gguf import tensors as gguf
from eagle_server.models.config import CheckpointError
from eagle_server.models.config_json import read_whole_config
from eagle_server.models.targets.registry import find_family
from eagle_server.models.wrappers import Order, text_config, text_name, wrapper_of
from eagle_server.ops.linear.blocks import BlockWeight
from eagle_server.ops.linear.quantize import QuantizedWeight

_NAMED = 8  # the number of keys that an error message lists
_LOCAL_MARKS = ("/", ".", "~", "\\")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja", "mask_embedding.pt"]
_HUB_PICKLES = ["*.bin", "*.bin.index.json", "*.pt"]
_HUB_SKIPPED = ["*/*", "consolidated*"]
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how a Git LFS pointer file begins
_MTP = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk: its key in `file` and its shape.

    `read` loads it, `part` only the part at an index, both to the host.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    part: Callable[[tuple[slice, ...]], Tensor] | None = None

    def read_part(self, index: tuple[slice, ...]) -> Tensor:
        """`read()[index]`."""
        return self.read()[index] if self.part is None else self.part(index)


@dataclass(frozen=True)
class QuantizedTensor(StoredTensor):
    """A quantized weight [out, in]. `read` dequantizes it, `load` does so only if no kernel takes it as it is.

    bits: of a weight in a GGUF file, scales included; None: it is another file.
    """

    load: Callable[[], QuantizedWeight | BlockWeight | Tensor] = field(kw_only=True)
    bits: float | None = None


Weights = dict[str, StoredTensor]

log = logging.getLogger(__name__)


def resolve_checkpoint(name: str | Path) -> Path:
    """The local directory of `name`, a directory or a Hub id `owner/model`. Hub files are downloaded once and cached.

    Raises:
        CheckpointError: the directory does not exist, and the Hub has no such model or cannot be reached.
    """
    local, text = Path(name).expanduser(), str(name)
    if local.is_dir():
        return local
    if local.exists():
        raise CheckpointError(f"{name}: a checkpoint directory is expected, this is a file")
    if isinstance(name, Path) or text.startswith(_LOCAL_MARKS) or text.count("/") > 1:
        raise CheckpointError(f"{name}: no such directory")
    return _download(text)


def resolve_file(name: str) -> Path:
    """The local path of a file, or of a Hub file `owner/model/file`, which is downloaded once and cached.

    Raises:
        CheckpointError: neither exists.
    """
    local = Path(name).expanduser()
    if local.is_file():
        return local
    owner, _, rest = name.partition("/")
    model, _, file = rest.partition("/")
    if name.startswith(_LOCAL_MARKS) or not file:
        raise CheckpointError(f"{name}: no such file")
    with _checkpoint_errors():
        path = hub_file(f"{owner}/{model}", file)
    if path is None:
        raise CheckpointError(f"{name}: no such file, and the model {owner}/{model} has none of this name")
    return path


def open_weights(directory: Path) -> Weights:
    """Every tensor of a checkpoint directory by name. Of safetensors files only the headers are read.

    Of a checkpoint that reads images too, those of its text decoder. Names are as `TargetFamily.renames` has them.

    Raises:
        CheckpointError: no weight files, a damaged or missing file, or a pickle that would run code.
    """
    stored = _open_files(directory)
    raw = read_whole_config(directory) if (directory / "config.json").is_file() else {}
    wrapper, own = wrapper_of(raw), text_config(raw)
    family = find_family(own)
    renames: Mapping[str, str] = {} if family is None else family.renames
    if wrapper is None:
        return {_usual(name, renames): tensor for name, tensor in stored.items()}
    hidden, text = own.get("hidden_size"), Weights()
    for key, tensor in stored.items():
        name = text_name(wrapper, key)
        if name is not None:
            name = _usual(name, renames)
            text |= {name: tensor} if wrapper.experts is None else split_experts(name, tensor, wrapper.experts, hidden)
    return text


def _usual(name: str, renames: Mapping[str, str]) -> str:
    for part, usual in renames.items():
        name = name.replace(part, usual)
    return name


def without_drafts(stored: Weights, layers: int) -> Weights:
    """A target's tensors without draft heads, MTP layers and RoPE frequencies. `layers`: the number of its own."""
    extra = {int(match[1]) for name in stored if (match := _MTP.fullmatch(name))}
    drafts = (
        *(prefix for row in ALGORITHMS.values() for prefix in row.prefixes),
        *(f"model.layers.{layer}." for layer in extra if layer >= layers),
    )
    return {
        name: tensor
        for name, tensor in stored.items()
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(drafts)
    }


def split_experts(name: str, tensor: StoredTensor, order: Order, hidden: int | None) -> Weights:
    """Experts that are stored as one tensor, as one tensor each.

    `order` "in, out": gate_up_proj [experts, hidden, 2 * width], down_proj [experts, width, hidden]. "out, in": both
    transposed. Where `hidden` fits the other order alone, that is the files' (transformers saves published ones so).
    """
    match = _FUSED_EXPERTS.fullmatch(name)
    if match is None or len(tensor.shape) != 3:  # noqa: PLR2004
        return {name: tensor}
    prefix, kind = match.groups()
    count, *sizes = tensor.shape
    inward = kind == "gate_up_proj"
    fits = {"in, out": sizes[0 if inward else 1] == hidden, "out, in": sizes[1 if inward else 0] == hidden}
    in_out = fits["in, out"] and (order == "in, out" or not fits["out, in"])
    rows, columns = reversed(sizes) if in_out else sizes
    halves = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    split: Weights = {}
    for expert in range(count):
        for part, (first, last) in (halves if inward else {"down_proj": (0, rows)}).items():
            where = (slice(expert, expert + 1), slice(None), slice(first, last))
            read = partial(_read_expert, tensor, where if in_out else (where[0], where[2], where[1]), in_out=in_out)
            key = f"{tensor.key}[{expert}]"
            split[f"{prefix}.{expert}.{part}.weight"] = StoredTensor(tensor.file, key, (last - first, columns), read)
    return split


def _read_expert(tensor: StoredTensor, where: tuple[slice, ...], *, in_out: bool) -> Tensor:
    matrix = tensor.read_part(where)[0]
    return matrix.t() if in_out else matrix


def _open_files(directory: Path) -> Weights:
    if (directory / gguf.INDEX).is_file():
        return _gguf(directory)
    for name, reader in (("model.safetensors", _safetensors), ("pytorch_model.bin", _pickled)):
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return reader(directory / name)
        if index.is_file():
            return _sharded(index, reader)
    for pattern, reader in (("*.safetensors", _safetensors), ("*.bin", _pickled), ("*.pt", _pickled)):
        files = sorted(directory.glob(pattern))
        if len(files) == 1:
            return reader(files[0])
        if files:
            names = ", ".join(file.name for file in files)
            raise CheckpointError(f"{directory}: several weight files and no index to choose by: {names}")
    raise CheckpointError(f"{directory}: no model.safetensors, pytorch_model.bin or their index.json here")


def copy_weights(views: Mapping[str, Tensor], stored: Weights, *, source: Path, progress: bool) -> None:
    """Fill each view with the stored tensor of its name, cast to the dtype of the view.

    Raises:
        CheckpointError: a missing or unexpected tensor, a wrong shape, or a wrong kind of number.
    """
    check_names(views, stored, source)
    for name, view in tqdm(
        views.items(), desc=f"load {source.name}", unit="tensor", disable=None if progress else True
    ):
        with torch.no_grad():
            view.copy_(read_as(stored[name], tuple(view.shape), floating=view.is_floating_point()))


def check_names(expected: Iterable[str], stored: Weights, source: Path) -> None:
    """Raise CheckpointError if the keys of the checkpoint are not exactly `expected`."""
    wanted = set(expected)
    missing, unexpected = sorted(wanted - set(stored)), sorted(set(stored) - wanted)
    if missing:
        raise CheckpointError(f"{source}: missing tensors: {some_of(missing)}; found {len(stored)} tensors")
    if unexpected:
        keys = [stored[name].key for name in unexpected]
        raise CheckpointError(f"{stored[unexpected[0]].file}: unexpected tensors: {some_of(keys)}")


def read_as(stored: StoredTensor, shape: tuple[int, ...], *, floating: bool) -> Tensor:
    """Read the tensor. Raise CheckpointError if it has another shape or kind of number."""
    if stored.shape != shape:
        raise CheckpointError(f"{stored.file}: {stored.key}: expected shape {list(shape)}, found {list(stored.shape)}")
    tensor = stored.read()
    if tensor.is_floating_point() != floating or (floating and tensor.element_size() == 1):
        kind = "16- or 32-bit floating point" if floating else "integers"
        raise CheckpointError(f"{stored.file}: {stored.key}: expected {kind}, found {tensor.dtype}")
    return tensor


def stored_heads(raw: Mapping[str, Any], stored: Weights, attention: str, source: str) -> dict[str, int]:
    """What q_proj and k_proj under the prefix `attention` say about head_dim and num_key_value_heads.

    Only what config.json does not have, or has otherwise, which is logged. A declared head_dim is never replaced: then
    num_attention_heads could as well be wrong.
    """
    sizes: dict[str, int] = {}
    q_rows, k_rows = (stored[name].shape[0] if name in stored else 0 for name in _projections(attention))
    heads, head_dim = raw.get("num_attention_heads"), raw.get("head_dim")
    if head_dim is None and isinstance(heads, int) and heads > 0 and q_rows % heads == 0:
        sizes["head_dim"] = head_dim = q_rows // heads
    if isinstance(head_dim, int) and head_dim > 0 and k_rows % head_dim == 0:
        sizes["num_key_value_heads"] = k_rows // head_dim
    sizes = {key: value for key, value in sizes.items() if value and raw.get(key) != value}
    for key in (key for key in sizes if raw.get(key) is not None):
        log.warning("%s: %s is %s, but the files hold %d; the tensors count", source, key, raw[key], sizes[key])
    return sizes


def _projections(attention: str) -> tuple[str, str]:
    return f"{attention}q_proj.weight", f"{attention}k_proj.weight"


def _refuse_pointer(path: Path) -> None:
    """Raise CheckpointError if a Git LFS pointer stands in place of a weight file."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: a Git LFS pointer, not the weights; fetch them in {path.parent} with: git lfs pull"
            )


def _gguf(directory: Path) -> Weights:
    files, places = gguf.read_index(directory)
    stored: Weights = {}
    for name, place in places.items():
        file = files[place.part]
        what, read = (file, place.key, tuple(place.shape)), partial(gguf.read, file, place)
        if gguf.has_blocks(place):
            load, bits = partial(gguf.read_blocks, file, place), 8 * place.size / math.prod(place.shape)
            stored[name] = QuantizedTensor(*what, read, load=load, bits=bits)
        else:
            stored[name] = StoredTensor(*what, read)
    return stored


def _safetensors(path: Path) -> Weights:
    _refuse_pointer(path)
    try:
        handle: Any = safe_open(path, framework="pt")
        keys: list[str] = list(handle.keys())
        slices = {key: handle.get_slice(key) for key in keys}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    return {
        key: StoredTensor(path, key, tuple(piece.get_shape()), partial(handle.get_tensor, key), partial(_part, piece))
        for key, piece in slices.items()
    }


def _part(piece: Any, index: tuple[slice, ...]) -> Tensor:
    """Slices of safetensors, unlike whole tensors, would follow the default device."""
    with torch.device("cpu"):
        part: Tensor = piece[index]
        return part


def _pickled(path: Path) -> Weights:
    state = load_pickle(path)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: a flat dictionary of tensors is expected, found {type(state).__name__}")
    return {
        key: StoredTensor(path, key, tuple(tensor.shape), partial(state.__getitem__, key))
        for key, tensor in state.items()
    }


def load_pickle(path: Path) -> Any:
    """The content of a file saved by torch, plain data only. Code in it is refused and never run."""
    _refuse_pointer(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        message = f"{path}: needs to run code to be read, which is refused; convert it to safetensors"
        raise CheckpointError(message) from None
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path}: not readable by torch.load ({error})") from None


def _sharded(index: Path, reader: Callable[[Path], Weights]) -> Weights:
    try:
        placed = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError):
        placed = None
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise CheckpointError(f"{index}: a JSON object with a weight_map from tensors to files is expected")
    stored: Weights = {}
    for shard in sorted(set(placed.values())):
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"{index}: names {shard}, which is not there; an incomplete download?")
        stored.update(reader(index.parent / shard))
    absent = sorted(set(placed) - set(stored))
    if absent:
        raise CheckpointError(f"{index}: names tensors that no shard holds: {some_of(absent)}")
    return stored


def _download(repository: str) -> Path:
    with _checkpoint_errors():
        directory = hub_snapshot(repository, allow=_HUB_FILES, ignore=_HUB_SKIPPED)
        if not any(directory.glob("*.safetensors")):
            hub_snapshot(repository, allow=_HUB_PICKLES, ignore=_HUB_SKIPPED)
    return directory


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    try:
        yield
    except HubError as error:
        raise CheckpointError(str(error)) from None


def some_of(names: Iterable[str]) -> str:
    """The first names, for a message."""
    every = [*names]
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(every[:_NAMED]) + more
