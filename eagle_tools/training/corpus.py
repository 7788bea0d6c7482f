"""Text to train on: the source of the Python standard library with whole files held out, or the user's files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from eagle_tools.training.chat_rows import refuse_chats
from eagle_tools.training.fingerprint import cached_arrays, fingerprint

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PER_MILLE = 15
MAX_FILE_BYTES = 200_000
OWN_HELD_OUT = 50  # one token in 50
_SKIPPED_DIRECTORIES = {"site-packages", "__pycache__", "lib2to3", "idlelib", "turtledemo", "encodings"}


@dataclass(frozen=True)
class Corpus:
    """Token streams of the training files and of the held-out files. Each document ends with the end-of-text token.

    key: a hash of the files and the tokenizer.
    """

    train: np.ndarray  # uint16 or uint32 [tokens]
    held_out: np.ndarray
    key: str


def standard_library_files() -> tuple[list[Path], list[Path]]:
    """(training files, held-out files) of this interpreter's standard library, split by a hash of the path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[Path] = []
    held_out: list[Path] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED_DIRECTORIES & set(parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        digest = hashlib.sha256("/".join(parts).encode()).digest()
        unseen = int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE
        (held_out if unseen else train).append(path)
    return train, held_out


def train_tokenizer(files: list[Path], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` entries, end-of-text first.

    A line break is its own token, never merged with the indentation after it. Most prompts end with a line break, and
    so they are tokenized as the training text was.
    """
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex("\n"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [lines, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((_text(path) for path in files), trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, files: Sequence[Path], end: int, label: str) -> np.ndarray:
    """The files as one token stream, with the token `end` after each."""
    pieces: list[int] = []
    for path in tqdm(files, desc=f"tokenize {label}", unit="file"):
        pieces.extend(tokenizer.encode(_text(path), add_special_tokens=False).ids)
        pieces.append(end)
    wide = tokenizer.get_vocab_size() > 1 << 16
    return np.asarray(pieces, dtype=np.uint32 if wide else np.uint16)


def standard_library(tokenizer: Tokenizer, end: int, cache: Path) -> Corpus:
    """The standard library's source; whole files are held out."""
    train, held_out = standard_library_files()

    def read() -> dict[str, np.ndarray]:
        return {
            "train": tokenize(tokenizer, train, end, "text"),
            "held_out": tokenize(tokenizer, held_out, end, "held-out text"),
        }

    return _cached(cache, _key(tokenizer, end, b"whole files", train, held_out), read)


def text_files(paths: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Every UTF-8 file of `paths` and below.

    Files below `out` do not count: a training writes there, and would not find its own text again.

    Raises:
        ValueError: a file of chats.
    """
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    if out is not None:
        files = [file for file in files if not file.resolve().is_relative_to(out.resolve())]
    return [file for file in files if file.is_file() and _is_text(file)]


def own_files(tokenizer: Tokenizer, texts: Sequence[Path], end: int, cache: Path) -> Corpus:
    """The user's files, see `text_files`; the last fiftieth of the stream is held out."""

    def read() -> dict[str, np.ndarray]:
        stream = tokenize(tokenizer, texts, end, "text")
        border = len(stream) - len(stream) // OWN_HELD_OUT
        return {"train": stream[:border], "held_out": stream[border:]}

    return _cached(cache, _key(tokenizer, end, f"1/{OWN_HELD_OUT}".encode(), texts), read)


def ensure_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer at `path`. If there is none, it is trained on the standard library and saved."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(standard_library_files()[0], vocab_size).save(str(path), pretty=False)
    return Tokenizer.from_file(str(path))


def _cached(path: Path, key: str, read: Callable[[], dict[str, np.ndarray]]) -> Corpus:
    arrays = cached_arrays(path, key, read)
    return Corpus(arrays["train"], arrays["held_out"], key)


def _key(tokenizer: Tokenizer, end: int, split: bytes, *lists: Sequence[Path]) -> str:
    """A hash of all that the token streams depend on; the names of files are not part of it."""
    contents = (fingerprint(path.read_bytes() for path in files).encode() for files in lists)
    return fingerprint([tokenizer.to_str().encode(), str(end).encode(), split, *contents])


def _is_text(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    refuse_chats(path, text)
    return True


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")
