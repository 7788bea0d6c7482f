"""A directory that stands for a GGUF file: config.json, tokenizer and an index of the tensors, made once and kept.

So all that reads checkpoints reads these files, too. Files of the same names beside the GGUF file come before its own
metadata. The tensors stay where they are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from eagle_server.models.checkpoints.gguf.architectures import END, architecture_of, config_of
from eagle_server.models.checkpoints.gguf.names import places
from eagle_server.models.checkpoints.gguf.tensors import INDEX, Place
from eagle_server.models.config import CheckpointError
from eagle_server.ops.native.build import CACHE, check_owner, directories

_VERSION = "4"  # of what is kept
_BESIDE = ("*.json", "*.jinja", "tokenizer.model")
_ENDS = (END, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_GPT2 = ("gpt-2", "gpt2")  # names of its way to split texts
_ADVICE = "put the model's tokenizer.json beside the file, or name it: --tokenizer-path"

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})")  # of llama-gguf-split; the first part has the metadata

logger = logging.getLogger(__name__)


def directory_of(file: Path, *, tokenizer: bool = True, alone: bool = False) -> Path:
    """The directory that stands for a GGUF file, with its tokenizer or without.

    alone: without the files beside it, which may be those of a head's target. Only then it may be a head.

    Raises:
        CheckpointError: the file is damaged, or its architecture or tokenizer is not supported.
        BuildError: what is kept might be another user's.
    """
    parts = _parts(file.resolve())
    file = parts[0]
    about = [(part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    beside = [each for pattern in _BESIDE for each in sorted(file.parent.glob(pattern)) if not alone]
    times = [(each.name, each.stat().st_mtime_ns) for each in beside]
    key = hashlib.sha256(repr((_VERSION, str(file), about, times, tokenizer)).encode()).hexdigest()
    for base in directories(CACHE.with_name("gguf"), "gguf"):
        directory = base / f"{file.stem}-{key[:16]}"
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(base)
            if (directory / INDEX).is_file():
                return directory
            unfinished = Path(tempfile.mkdtemp(dir=base, prefix=".unfinished-"))
        except OSError:
            continue  # a cache that cannot be written
        try:
            own = tokenizer and not (file.parent / "tokenizer.json").is_file()
            _write(parts, unfinished, tokenizer=own, is_draft=alone)
            for each in beside:
                shutil.copyfile(each, unfinished / each.name)
            if not directory.is_dir():
                unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return directory
    raise CheckpointError(f"{file}: neither {CACHE.parent} nor the directory for temporary files can be written")


def _parts(file: Path) -> list[Path]:
    """The files that together are this one.

    Raises:
        CheckpointError: one is missing.
    """
    name = _PART.fullmatch(file.stem)
    if name is None:
        return [file]
    count = int(name[2])
    parts = [file.with_name(f"{name[1]}-{number:05d}-of-{name[2]}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(f"{file}: one of {count} parts, of which {', '.join(missing[:3])} is missing")
    return parts


def _opened(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except (ValueError, LookupError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable GGUF file ({error})") from None


def _found(file: Path, reader: GGUFReader, part: int) -> dict[str, Place]:
    """Where the tensors of one file are, by their names."""
    found = {}
    for tensor in reader.tensors:
        shape, offset, size = tensor.shape.tolist(), int(tensor.data_offset), int(tensor.n_bytes)
        place = Place(tensor.name, tensor.tensor_type.name, [int(size) for size in reversed(shape)], offset, size)
        if offset + size > file.stat().st_size:
            raise CheckpointError(f"{file}: ends before its tensors do; an incomplete download?")
        found[tensor.name] = place._replace(part=part)
    return found


def _write(parts: Sequence[Path], directory: Path, *, tokenizer: bool, is_draft: bool) -> None:
    file, readers = parts[0], [_opened(part) for part in parts]
    metadata = {name: _exact(field.contents()) for name, field in readers[0].fields.items() if not _is_long(field)}
    if metadata.get("split.count", 1) > len(parts):
        count = metadata["split.count"]
        raise CheckpointError(f"{file}: one of {count} parts; name it ...-00001-of-{count:05d}.gguf, as all parts")
    found: dict[str, Place] = {}
    for part, reader in enumerate(readers):
        found |= _found(parts[part], reader, part)
    every = (tensor for reader in readers for tensor in reader.tensors)
    factors = next((tensor.data.tolist() for tensor in every if tensor.name == "rope_freqs.weight"), None)
    try:
        row, config = architecture_of(metadata), config_of(metadata, found, factors)
        if row.is_head and not is_draft:
            raise CheckpointError("a draft head, no model; name it with --speculative-draft-model-path")
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    named = places(found, row, config, str(file))
    ends = [int(metadata[key]) for key in _ENDS if key in metadata]
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if ends:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    if tokenizer:
        _write_tokenizer(file, directory, metadata)
    (directory / INDEX).write_text(
        json.dumps({"files": [str(part) for part in parts], "tensors": named}), encoding="utf-8"
    )


def _exact(value: Any) -> Any:
    """A number that was rounded to float32, as it was before: 1e-05 and not 9.999999747e-06."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _is_long(field: Any) -> bool:
    """Whether it is a list of tokens, merges or the like, which takes seconds to read."""
    return len(field.data) > 1024  # noqa: PLR2004


def _write_tokenizer(file: Path, directory: Path, metadata: Mapping[str, Any]) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template, as transformers makes them from the metadata."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds of import
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, split = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "gpt2" and split not in {*GGUF_PRE_TOKENIZER_SPLITS, *_GPT2}:  # transformers would take GPT-2's
        raise CheckpointError(f"{file}: how its tokenizer splits texts ({split}) is not known; {_ADVICE}")
    try:
        classes = PreTrainedTokenizerFast if kind == "gpt2" else AutoTokenizer  # which knows fewer architectures
        tokenizer = classes.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(directory)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file}: its tokenizer cannot be read ({reason}); {_ADVICE}") from None
