"""The tokenizer interface that the server uses, its implementations, and loading."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken

from eagle_server.hub import HubError, hub_names
from eagle_server.machine import usable_memory
from eagle_server.text.cuts import PIECE, cuts_of, special_around, splits_at_cuts
from eagle_server.text.model_files import find_file, read_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE, ADDED_FILE = "tokenizer_config.json", "added_tokens.json"  # may declare more tokens
ADDED_FIELDS = frozenset({"content", "single_word", "lstrip", "rstrip", "normalized", "special"})
# formats that transformers may read
OTHER_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


_MEDIA = re.compile(r"image|img|video|audio|vision|media", re.IGNORECASE)
_LONG = 1024  # token ids; decoding more takes a millisecond
# UTF-8 bytes that are tokenized at once. A byte takes up to 160 bytes of memory, and four threads tokenize long texts;
# freeing the tokens of more than 4 MiB holds the interpreter lock for more than 50 ms.
MAX_PIECE_BYTES = min(2**22, usable_memory() // 16 // 160)

logger = logging.getLogger(__name__)


class TooManyTokens(ValueError):
    """A text has more tokens than the caller takes: at least `count`."""

    def __init__(self, count: int) -> None:
        super().__init__(f"at least {count} tokens")
        self.count = count


class TextTooLong(ValueError):
    """A text cannot be tokenized in pieces, and takes too much memory at once."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def longest_piece(self) -> int:
        """Characters of the longest vocabulary entry. A token's text is at most a few times as long."""
        ...

    def encode(
        self, text: str, *, special: bool = True, limit: int | None = None, last: int | None = None
    ) -> list[int]:
        """Token ids of `text`. `special`: with the tokens that the model expects around a prompt, such as BOS.

        `last`: only so many of the last ones, instead of a limit.

        Raises:
            TooManyTokens: there are more than `limit`.
            TextTooLong: it would take too much memory.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `token_ids`. Special tokens have text only if `special`. Invalid UTF-8 becomes U+FFFD."""
        ...

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, None for an id without an entry."""
        ...

    def token_id(self, piece: str) -> int | None:
        """The id of the vocabulary entry `piece`, None if there is none."""
        ...

    @property
    def special(self) -> Mapping[int, str]:
        """The special tokens' spellings by id."""
        ...


class FastTokenizer:
    """A tokenizer.json."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.longest_piece = max(map(len, tokenizer.get_vocab()), default=1)
        self._around = special_around(tokenizer) if splits_at_cuts(tokenizer) else None  # None: it takes no pieces

    def encode(
        self, text: str, *, special: bool = True, limit: int | None = None, last: int | None = None
    ) -> list[int]:
        cuts = cuts_of(text) if self._around is not None and len(text) > PIECE else []
        if self._around is None or not cuts:
            ids = self._encode(text, limit, special=special)
            return ids if last is None else ids[-last:]
        before, after = self._around if special else ([], [])
        pieces = list(pairwise([0, *cuts, len(text)]))
        if last is not None:
            return self._last(text, pieces, last, (before, after))
        ids = before.copy()
        for begin, end in pieces:
            ids += self._encode(text[begin:end], limit)
            _check_count(len(ids) + len(after), limit)
        return ids + after

    def _last(
        self, text: str, pieces: Sequence[tuple[int, int]], last: int, around: tuple[list[int], list[int]]
    ) -> list[int]:
        """The last tokens. The pieces before them are not tokenized."""
        before, after = around
        found = [after]
        for begin, end in reversed(pieces):
            if sum(map(len, found)) >= last:
                break
            found.append(self._encode(text[begin:end]))
        else:
            found.append(before)
        return list(chain.from_iterable(reversed(found)))[-last:]

    def _encode(self, text: str, limit: int | None = None, *, special: bool = False) -> list[int]:
        """Token ids of a text at once."""
        _check_bytes(text)
        # Unlike `encode`, this releases the interpreter lock, so other threads run while a long prompt is tokenized.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        _check_count(len(encoding), limit)  # a list of millions would be made under the lock
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        if len(token_ids) > _LONG:  # unlike `decode`, this releases the interpreter lock
            [text] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=not special)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=not special)
        return str(text)

    def piece(self, token_id: int) -> str | None:
        piece: str | None = self._tokenizer.id_to_token(token_id)
        return piece

    def token_id(self, piece: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(piece)
        return token_id

    @property
    def special(self) -> Mapping[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}


class TransformersTokenizer:
    """transformers.AutoTokenizer, for a directory without tokenizer.json. Code from the checkpoint is never run."""

    def __init__(self, location: str) -> None:
        from transformers import AutoTokenizer  # its import takes seconds, and most servers do not need it

        self._tokenizer: Any = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
        self.longest_piece = max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(
        self, text: str, *, special: bool = True, limit: int | None = None, last: int | None = None
    ) -> list[int]:
        _check_bytes(text)
        ids = list(self._tokenizer.encode(text, add_special_tokens=special))
        if last is not None:
            return ids[-last:]
        _check_count(len(ids), limit)
        return ids

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def piece(self, token_id: int) -> str | None:
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        return piece if isinstance(piece, str) else None

    def token_id(self, piece: str) -> int | None:
        token_id = self._tokenizer.get_vocab().get(piece)
        return token_id if isinstance(token_id, int) else None

    @property
    def special(self) -> Mapping[int, str]:
        return {int(token_id): self.piece(token_id) or "" for token_id in self._tokenizer.all_special_ids}


def _check_bytes(text: str) -> None:
    if 4 * len(text) > MAX_PIECE_BYTES and (size := len(text.encode())) > MAX_PIECE_BYTES:
        raise TextTooLong(f"{size} bytes that cannot be tokenized in pieces; at most {MAX_PIECE_BYTES} can at once")


def _check_count(count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        raise TooManyTokens(count)


def media_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that stand for images, video and audio or enclose them, by their spelling."""
    return frozenset(token_id for token_id, piece in tokenizer.special.items() if _MEDIA.search(piece))


def load_tokenizer(location: str) -> Tokenizer:
    """The tokenizer of a directory or of a Hugging Face id.

    Raises:
        ValueError: there is none, or it cannot be read; the message is one line.
        HubError: the model cannot be had from the Hub.
    """
    try:
        file = _find(location)
        if file is None:
            return TransformersTokenizer(location)
        return FastTokenizer(_from_file(file, location))
    except HubError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"no usable tokenizer in {location}: {reason}{_gguf_files(location)}") from error


def _gguf_files(location: str) -> str:
    """Advice for a model on the Hub that has GGUF files; "": it has none."""
    if Path(location).is_dir():
        return ""
    found: list[str] = []
    with suppress(HubError):
        found = [name for name in hub_names(location) if name.endswith(".gguf")]
    return f"; it has GGUF files: name one, as {location}:{found[0]}" if found else ""


def read_tokenizer_file(location: str) -> tokenizers.Tokenizer:
    """The tokenizer.json of a directory or of a Hugging Face id.

    Raises:
        ValueError: there is none; the message is one line.
    """
    file = find_file(location, TOKENIZER_FILE)
    if file is None:
        raise ValueError(f"{location} has no {TOKENIZER_FILE}, which grammars need")
    return _from_file(file, location)


def _from_file(file: Path, location: str) -> tokenizers.Tokenizer:
    """The tokenizer with the tokens that other files of the model add to it, as in transformers."""
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    for number, token in sorted(_declared(location).items()):
        if tokenizer.token_to_id(token.content) is not None:
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if (found := tokenizer.token_to_id(token.content)) != number:
            logger.warning("%s: token %r is declared with id %d, and gets %s", location, token.content, number, found)
    return tokenizer


def _declared(location: str) -> dict[int, tokenizers.AddedToken]:
    """Added tokens by id: those of tokenizer_config.json, or of the older added_tokens.json."""
    described: dict[str, Any] | None = read_json(location, CONFIG_FILE).get("added_tokens_decoder")
    if described is None:
        older = read_json(location, ADDED_FILE)
        return {number: AddedToken(content, special=True) for content, number in older.items()}
    return {
        int(number): AddedToken(**{name: value for name, value in fields.items() if name in ADDED_FIELDS})
        for number, fields in described.items()
    }


def _find(location: str) -> Path | None:
    """Path of tokenizer.json, None if the tokenizer has another format."""
    file = find_file(location, TOKENIZER_FILE)
    directory = Path(location)
    if file is None and directory.is_dir() and not any((directory / name).exists() for name in OTHER_FILES):
        raise FileNotFoundError(f"it has no {TOKENIZER_FILE}")
    return file
