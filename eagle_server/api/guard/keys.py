"""The API keys: their names, their limits, and reading them again while the server runs."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle_server.api.guard.rate_limits import ClientLimits

logger = logging.getLogger(__name__)

_SHORT = 16  # characters; a shorter key after a name may be the rest of a key with a colon
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.*)")


@dataclass(frozen=True)
class KeyHolder:
    """The owner of keys. Several keys may have one name, and share its limits. Who needs no key has the name ""."""

    name: str
    limits: ClientLimits


class ApiKeys:
    """--api-key and the lines of --api-key-file. Without any key, all clients are one holder without a name."""

    def __init__(self, key: str | None, file: str | None, limits: Callable[[], ClientLimits]) -> None:
        """
        Raises:
            ValueError: the file has no key, one twice, or a name without one.
            OSError: it cannot be read.
        """
        self._key, self._file, self._limits = key, file, limits
        self._holders: dict[str, KeyHolder] = {}
        self._authorizations: list[tuple[bytes, KeyHolder]] = []
        self.load()

    def load(self) -> None:
        """Read the file again. Names that stay keep their counts. Raises as `__init__`, and then changes nothing."""
        named = {} if self._file is None else read_keys(Path(self._file).expanduser())
        if self._key is not None:
            named.setdefault(self._key, "api-key")
        names = sorted(set(named.values())) or [""]
        holders = {name: self._holders.get(name) or KeyHolder(name, self._limits()) for name in names}
        self._holders = holders
        self._authorizations = [(f"Bearer {key}".encode(), holders[name]) for key, name in named.items()]

    def reload(self) -> None:
        """`load`, with a line in the log. If the file is wrong, the keys stay as they are."""
        try:
            self.load()
        except (OSError, ValueError) as error:
            logger.error("the API keys stay as they are: %s", error)
        else:
            logger.info("%d API keys of %s", len(self._authorizations), ", ".join(self.names) or "nobody")

    @property
    def nobody(self) -> KeyHolder:
        """The holder of requests that need no key: all of a server without keys, else those for open paths."""
        return self._holders.get("") or KeyHolder("", ClientLimits())

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return [name for name in self._holders if name]

    @property
    def are_needed(self) -> bool:
        return bool(self._authorizations)

    def find(self, headers: Mapping[str, str]) -> KeyHolder | None:
        """The holder of the key in `authorization` or `x-api-key`; None if neither has a valid key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        values = (token.strip(" \t") if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        sent = [f"Bearer {key}".encode("latin-1") for key in values]
        # Compare each header with all keys in constant time, so the response time reveals nothing about them.
        pairs = ((header, key, holder) for key, holder in self._authorizations for header in sent)
        equal = [holder for header, key, holder in pairs if hmac.compare_digest(header, key)]
        return equal[0] if equal else None


def read_keys(path: Path) -> dict[str, str]:
    """The names of the keys in a file, by key. A line is `name:key` or a key, which gets a name by its place.

    Empty lines and lines that begin with # are skipped.

    Raises:
        ValueError: there is no key, one twice, or a name without one.
        OSError: it cannot be read.
    """
    names: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _NAMED.fullmatch(text)
        name, key = (match[1], match[2].strip()) if match else (f"key-{len(names) + 1}", text)
        if not key:  # a variable was empty, or the file is half written
            raise ValueError(f"--api-key-file {path}: line {number} has the name {name}, and no key after the colon")
        if match and len(key) < _SHORT:
            logger.warning("%s: line %d is read as name:key, and the key of %s is short", path, number, name)
        if key in names:
            raise ValueError(f"--api-key-file {path}: line {number} has a key that an earlier line has")
        names[key] = name
    if not names:
        raise ValueError(f"--api-key-file {path}: there is no key in it, one a line")
    return names
