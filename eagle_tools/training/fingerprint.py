"""What a training was made from, as hashes: caches and checkpoints of other inputs must not be used in silence."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_server.models.checkpoints.save import HasWeightViews
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.data_parallel import is_first

_FREE = ("steps", "compiled")  # settings that may change when a training goes on

log = logging.getLogger(__name__)


def fingerprint(parts: Iterable[bytes]) -> str:
    """A hash of the parts and of where each ends."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def target_fingerprint(target: TargetModel) -> str:
    """A hash of the config and of all weights, wherever the files are."""
    return fingerprint([repr(target.config).encode(), *_weight_hashes(target)])


def weights_fingerprint(model: HasWeightViews) -> str:
    """A hash of the names and values of all weights."""
    names = (name.encode() for name, _ in model.weight_views())
    return fingerprint([*names, *_weight_hashes(model)])


def _weight_hashes(model: HasWeightViews) -> Iterator[bytes]:
    for _, view in model.weight_views():
        yield hashlib.blake2b(view.detach().cpu().contiguous().view(torch.uint8).numpy().data).digest()


def training_inputs(target: TargetModel, corpus_key: str, recipe: Any, start: str | None = None) -> dict[str, Any]:
    """The settings of `recipe`, a dataclass, that may not change between two runs, with hashes of target and corpus.

    start: a hash of the head that is trained on; None: a new head.
    """
    settings = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in _FREE}
    settings |= {"target": target_fingerprint(target), "corpus": corpus_key, "start": start}
    return json.loads(json.dumps(settings))  # type: ignore[no-any-return]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of inputs that were other, absent or additional."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def claim(directory: Path, inputs: Mapping[str, Any], steps: int) -> None:
    """Write the inputs into `directory`.

    Raises:
        ValueError: the directory holds a training from other inputs; only `steps` may differ.
    """
    path = directory / "recipe.json"
    if path.is_file():
        before = {name: value for name, value in json.loads(path.read_text()).items() if name not in _FREE}
        if changed := differences(before, inputs):
            raise ValueError(
                f"{directory} holds a training with other settings ({', '.join(changed)}; see {path}); choose another "
                "--out, or delete the directory"
            )
    if is_first():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**inputs, "steps": steps}, indent=2) + "\n")


def cached_arrays(path: Path, key: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays in `path`, if `key` is the hash of what they were made from. Otherwise they are made and saved."""
    if path.is_file():
        with np.load(path) as stored:
            arrays = dict(stored)
        if str(arrays.pop("key", "")) == key:
            return arrays
        log.warning("%s: made from another target, other text or other settings; it is made again", path)
    arrays = make()
    save_arrays(path, key, arrays)
    return arrays


def save_arrays(path: Path, key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays with the hash of what they were made from. An interrupted run leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **{**arrays, "key": np.array(key)})  # type: ignore[arg-type]
    temporary.replace(path)
