"""Which of the benchmark's optional packages are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def version(distribution: str) -> str | None:
    """The installed version; None if it is not installed or has no version."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
