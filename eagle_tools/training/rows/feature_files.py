"""Features of token rows on disk: `capture` writes them, and trainings read them.

DIR/capture.json                what was captured
DIR/target.safetensors          the target's embedding, last norm and lm_head, as its engine computes with them
DIR/features-00000.safetensors  of several rows, one after the other:
    hidden_states   [tokens, n + 1, H], in the target's dtype: the residual streams at n boundaries, then the last
                    hidden state after the final norm, which is the lm_head's input
    token_ids       int64 [tokens]
    loss_mask       uint8 [tokens]
                    and in the metadata `rows`: [[id, gen, tokens], ...]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle_tools.training.rows.token_rows import TokenRow

WEIGHTS = "target.safetensors"
_FACTS = "capture.json"
_FILE_BYTES = 1 << 29  # of features in one file, at most; one longer row has a file of its own


@dataclass(frozen=True)
class CaptureFacts:
    """What a capture depends on.

    boundaries: of the residual streams, b for the stream after b layers. dtype: of the features, as torch names it.
    quantization: what the engine was asked for.
    files: how many there are when the capture is complete. target, rows: hashes of the weights in WEIGHTS, and of the
    rows.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    boundaries: tuple[int, ...]
    dtype: str
    quantization: str | None
    eos_token_ids: tuple[int, ...]
    files: int
    target: str
    rows: str

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def file_of(directory: Path, number: int) -> Path:
    return directory / f"features-{number:05d}.safetensors"


def files_of_rows(lengths: Sequence[int], token_bytes: int) -> list[range]:
    """Which rows each file has, for rows of so many tokens that take `token_bytes` each."""
    files, first, filled = [], 0, 0
    for number, length in enumerate(lengths):
        if number > first and filled + length * token_bytes > _FILE_BYTES:
            files.append(range(first, number))
            first, filled = number, 0
        filled += length * token_bytes
    return [*files, range(first, len(lengths))] if lengths else []


def write_whole(path: Path, tensors: Mapping[str, Tensor], rows: Sequence[tuple[str, int, int]] = ()) -> None:
    """Write tensors, and the (id, gen, tokens) of their rows. A kill leaves no part of a file under its name."""
    temporary = path.with_suffix(".tmp")
    save_file(dict(tensors), temporary, metadata={"rows": json.dumps(rows)})
    temporary.chmod(0o644)  # safetensors creates files that only the owner may read
    temporary.replace(path)


def begin_capture(directory: Path, facts: CaptureFacts, weights: Mapping[str, Tensor]) -> list[int]:
    """Start a capture in `directory`, or go on with it. Returns the numbers of the files that are not there yet.

    Raises:
        ValueError: the directory holds another capture.
    """
    path = directory / _FACTS
    if path.is_file() and (found := _read_facts(path)) != facts:
        before, now = asdict(found), asdict(facts)
        changed = ", ".join(name for name in now if before[name] != now[name])
        raise ValueError(f"{directory} holds a capture with another {changed}; choose another --out, or delete it")
    directory.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_whole(directory / WEIGHTS, weights)
        path.write_text(facts.text())
    return [number for number in range(facts.files) if not file_of(directory, number).is_file()]


class CapturedFeatures:
    """The complete capture in a directory.

    Raises:
        ValueError: there is none, or it is not complete.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / _FACTS
        if not path.is_file():
            raise ValueError(f"{directory}: no features; `eagle-server train capture` writes them")
        self.directory, self.facts = directory, _read_facts(path)
        files = [file_of(directory, number) for number in range(self.facts.files)]
        if missing := sum(not file.is_file() for file in files):
            raise ValueError(f"{directory}: {missing} of {len(files)} files are missing; run the capture again")
        self._places: list[tuple[Path, int, int]] = []  # of each row: its file, first token and number of tokens
        self._names: list[tuple[str, int]] = []  # of each row: id and gen
        for file in files:
            first = 0
            for row_id, gen, tokens in json.loads(_opened(file).metadata()["rows"]):
                self._places.append((file, first, tokens))
                self._names.append((row_id, gen))
                first += tokens

    def rows(self) -> Iterator[TokenRow]:
        """The captured rows, by number."""
        for (name, gen), (file, first, tokens) in zip(self._names, self._places, strict=True):
            parts = (
                _opened(file).get_slice(key)[first : first + tokens].tolist() for key in ("token_ids", "loss_mask")
            )
            ids, mask = map(tuple, parts)
            yield TokenRow(name, gen, ids, mask)

    def read(self, number: int, tokens: int) -> Tensor:
        """The features of the first `tokens` tokens of a row, [tokens, n + 1, H]."""
        file, first, _ = self._places[number]
        features: Tensor = _opened(file).get_slice("hidden_states")[first : first + tokens]
        return features

    def weights(self) -> dict[str, Tensor]:
        """The tensors of WEIGHTS."""
        opened = _opened(self.directory / WEIGHTS)
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, no dict

    def zeros(self, *shape: int) -> Tensor:
        """Features of padding, [*shape, n + 1, H]."""
        facts = self.facts
        return torch.zeros(*shape, len(facts.boundaries) + 1, facts.hidden_size, dtype=getattr(torch, facts.dtype))


@cache
def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")


def _read_facts(path: Path) -> CaptureFacts:
    return msgspec.json.decode(path.read_bytes(), type=CaptureFacts)
