"""A server for language models with speculative decoding, and its Python API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_server.llm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is used: it imports torch, which a server's API process does not."""
    if name in __all__:
        return getattr(import_module("eagle_server.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
