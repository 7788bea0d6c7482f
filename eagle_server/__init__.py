"""A server for language models with speculative decoding, and its Python API."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_server.llm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "version"]


@cache
def version() -> str:
    """Version of the installed package. Cached, because the look-up reads files."""
    try:
        return metadata.version("eagle-server")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is used: it imports torch, which a server's API process does not."""
    if name in __all__:
        return getattr(import_module("eagle_server.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
