"""GGUF files on the Hub. A repository has one for each type, some in parts: one is chosen and downloaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from eagle_server.hub import HubError, hub_file, hub_names, why_offline
from eagle_server.models.checkpoints.weights import some_of
from eagle_server.models.config import CheckpointError

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
_NO_MODELS = ("mmproj", "imatrix")  # image towers, and statistics of a rounding


def hub_model(repository: str, wanted: str) -> Path:
    """The GGUF file of a repository, downloaded once and cached; of one in parts the first.

    wanted: its name, or the type at the end of its name, as Q4_K_M.

    Raises:
        CheckpointError: there is no such file, there are several, or the Hub cannot be reached.
    """
    try:
        names = model_files(hub_names(repository))
        name = chosen(names, repository, wanted)
        parts = (
            [name]
            if _PART.search(name) is None
            else [each for each in names if _PART.sub("", each) == _PART.sub("", name)]
        )
        files = [hub_file(repository, part) for part in parts]
    except HubError as error:
        raise CheckpointError(str(error)) from None
    assert files[0] is not None, "the name is from the list of the repository's files"
    return files[0]


def model_files(names: Sequence[str]) -> list[str]:
    """The GGUF files among these that hold models, parts in order."""
    return [
        name for name in sorted(names) if name.endswith(".gguf") and not name.rpartition("/")[2].startswith(_NO_MODELS)
    ]


def chosen(names: Sequence[str], repository: str, wanted: str) -> str:
    """The file that is wanted, by its name or by its type; of one in parts the first.

    Raises:
        CheckpointError: there is none, or there are several.
    """
    whole = {_PART.sub("", name): name for name in reversed(names)}  # the first part comes last
    if wanted.endswith(".gguf"):
        found = [name for short, name in whole.items() if _PART.sub("", wanted) == short]
    else:
        ends = re.compile(rf"(?:^|[-./]){re.escape(wanted)}\.gguf", re.IGNORECASE)
        found = [name for short, name in whole.items() if ends.search(short) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{repository}: {wanted} could be {some_of(found)}; name the file: {repository}:{found[0]}"
        )
    where = f" in the cache, as {reason}" if (reason := why_offline()) is not None else ""
    known = f"there are {some_of(sorted(whole))}" if whole else "it has no GGUF file"
    raise CheckpointError(f"{repository}: no GGUF file {wanted}{where}; {known}")
