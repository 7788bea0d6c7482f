"""The version of the installed package."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """Version of the installed package. Cached, because the look-up reads files."""
    try:
        return metadata.version("eagle-server")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"
