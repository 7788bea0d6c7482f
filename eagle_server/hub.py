"""Files of models on the Hugging Face Hub: from the local cache, or downloaded into it.

Without a network the hub's library takes half a minute for each file. So the hub is probed once. If it does not answer,
only the cache is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0  # a hub that does not answer in this time counts as unreachable


class HubError(OSError):
    """The hub has no such model or file, or refuses it; the message is one line."""


class NotCached(HubError):
    """The file is not in the cache, and the hub cannot be reached."""


def hub_file(repository: str, name: str) -> Path | None:
    """The path of a model's file in the cache; None if the model has no such file.

    Raises:
        NotCached, HubError: it can be neither read nor downloaded.
    """
    from huggingface_hub import hf_hub_download  # not needed for local directories
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _in_our_words(repository, name):
        try:
            return Path(hf_hub_download(repository, name, local_files_only=why_offline() is not None))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None


def hub_snapshot(repository: str, *, allow: Sequence[str], ignore: Sequence[str]) -> Path:
    """The directory in the cache with a model's files that match `allow` and not `ignore`.

    Raises:
        NotCached, HubError: they can be neither read nor downloaded.
    """
    from huggingface_hub import snapshot_download

    with _in_our_words(repository, "the model"):
        offline = why_offline() is not None
        return Path(
            snapshot_download(
                repository, allow_patterns=list(allow), ignore_patterns=list(ignore), local_files_only=offline
            )
        )


def hub_names(repository: str) -> list[str]:
    """The names of a model's files; without a network of those in the cache.

    Raises:
        NotCached, HubError: nothing is in the cache, or the hub has no such model.
    """
    from huggingface_hub import HfApi

    if why_offline() is not None:
        cached = hub_snapshot(repository, allow=[], ignore=[])
        return sorted(str(file.relative_to(cached)) for file in cached.rglob("*") if file.is_file())
    try:
        with _in_our_words(repository, "the model"):
            return sorted(HfApi().list_repo_files(repository))
    except HubError:
        raise
    except Exception as error:  # as in `why_offline`
        raise HubError(f"{repository}: its files cannot be listed ({_first_line(error)})") from None


@cache
def why_offline() -> str | None:
    """Why only the cache is read; None: the hub answers."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception as error:  # the hub's library may use any HTTP package
        logger.debug("no answer from %s: %r", constants.ENDPOINT, error)
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    return None


@contextmanager
def _in_our_words(repository: str, wanted: str) -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except LocalEntryNotFoundError as error:
        why = why_offline() or f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"
        raise NotCached(
            f"{repository}: no such directory, and {wanted} is not in the cache of Hugging Face's models "
            f"({constants.HF_HUB_CACHE}), and {why}; `hf download {repository}` fills it where there is a network"
        ) from None
    except GatedRepoError:
        raise HubError(
            f"{repository}: {constants.ENDPOINT} gives this model only to accounts that accepted its terms; "
            "set HF_TOKEN to the token of one"
        ) from None
    except RepositoryNotFoundError:
        raise HubError(
            f"{repository}: no such directory, and no such model on {constants.ENDPOINT}; a private one needs HF_TOKEN"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise HubError(f"{repository}: {constants.ENDPOINT} refuses: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
