"""Keeps the weights that `--quantization` rounded, packed as the native kernels read them.

Later starts map the file into memory: nothing is rounded, packed or copied, and the servers of one machine share its
pages. It is a safetensors file whose weights begin at cache lines.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from eagle_server.models.checkpoints.weights import Weights
from eagle_server.models.config import CheckpointError
from eagle_server.models.layers import Linear
from eagle_server.ops.linear import quantize
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.build import SOURCES
from eagle_server.ops.native.linear import CACHE_LINE, NativeWeight
from eagle_server.ops.whole_file import put_whole, remove_unfinished

_TYPES = {torch.uint8: "U8", torch.float32: "F32"}
_DIGITS = 16  # of a file's name
log = logging.getLogger(__name__)


class PackedCache:
    """The file of one checkpoint in one format."""

    def __init__(
        self, directory: Path, checkpoint: Path, stored: Weights, quantization: Quantization, dtype: torch.dtype
    ) -> None:
        """`directory` keeps the files. Their names change with the checkpoint, and with how weights are rounded.

        Raises:
            CheckpointError: it is no directory, and none can be made.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            remove_unfinished(directory)
        except OSError as error:
            raise CheckpointError(f"--quantization-cache: {directory} cannot be used ({error})") from None
        digest = hashlib.sha256(f"{quantization} {dtype}".encode())
        for source in (Path(quantize.__file__), SOURCES / "packed.h", checkpoint / "config.json"):
            digest.update(source.read_bytes() if source.is_file() else b"")
        for file in sorted({tensor.file for tensor in stored.values()}):
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        self._path = directory / f"{checkpoint.name}-{quantization}-{digest.hexdigest()[:_DIGITS]}.safetensors"

    def read(self, model: nn.Module) -> dict[Linear, NativeWeight] | None:
        """The weights of all linear layers of `model`; None: they were not written yet."""
        linears = _linears(model)
        if not self._path.is_file():
            return None
        try:
            handle: Any = safe_open(self._path, framework="pt")
            kinds = json.loads((handle.metadata() or {})["linears"])
            if set(kinds) != set(linears):
                raise ValueError("it is of another model")
            weights = {linear: _mapped(handle, name, linear, kinds[name]) for name, linear in linears.items()}
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("--quantization-cache: %s cannot be used and is made again (%s)", self._path, error)
            return None
        log.info("rounded weights are mapped from %s", self._path)
        return weights

    def write(self, model: nn.Module) -> None:
        """Keep the packed weights of all linear layers. Without them, on a full disk, the model serves all the same."""
        weights = {name: linear.native[0] for name, linear in _linears(model).items() if linear.native is not None}
        if any(weight.quantization is None for weight in weights.values()):
            log.warning("--quantization-cache: weights in the blocks of a GGUF file are not kept")
            return
        tensors = {
            f"{name}.{part}": tensor for name, weight in weights.items() for part, tensor in weight.tensors().items()
        }
        kinds = {name: [weight.quantization, weight.group] for name, weight in weights.items()}
        # Zeros are no multiple of a cache line, so they come last.
        ordered = dict(sorted(tensors.items(), key=lambda item: item[0].endswith(".zeros")))

        def fill(path: Path) -> None:
            with path.open("wb") as file:
                file.write(_header(ordered, {"format": "pt", "linears": json.dumps(kinds)}))
                for tensor in ordered.values():
                    file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())

        try:
            put_whole(self._path, fill)
        except OSError as error:
            log.warning("--quantization-cache: %s cannot be written (%s)", self._path, error)
            return
        log.info("rounded weights are kept in %s (%.0f MB)", self._path, self._path.stat().st_size / 1e6)


def _linears(model: nn.Module) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def _mapped(handle: Any, name: str, linear: Linear, kind: tuple[Quantization, int]) -> NativeWeight:
    names, stored = {part: f"{name}.{part}" for part in ("data", "scales", "zeros")}, set(handle.keys())
    parts = {part: handle.get_tensor(key) for part, key in names.items() if key in stored}
    shape = (linear.weight.shape[0], linear.weight.shape[1])
    return NativeWeight.packed(shape, *kind, **parts)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file, up to a cache line."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.nbytes]
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % CACHE_LINE)
    return struct.pack("<Q", len(text)) + text
