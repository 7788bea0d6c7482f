"""Loading FlashInfer's modules of kernels, and why one could not be loaded.

FlashInfer loads a module when a plan or an operation first needs it. flashinfer-jit-cache has prebuilt ones for common
shapes. All others are compiled by nvcc, once per machine, which takes minutes.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Collection
from functools import cache

import torch

from eagle_server.attention.flashinfer.forward import FlashInferBackend
from eagle_server.attention.flashinfer.scratch import LONG_ROWS
from eagle_server.attention.interface import Layout
from eagle_server.ops.layers import fused

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256, 512)  # the head sizes of fa2's kernels
FA3_HEAD_DIMS = (64, 128, 256)  # and of fa3's

# One forward of each kind that loads modules: decoding, a few rows, prompt chunks, a tree.
_FORWARDS = (
    Layout((1,), (1,)),
    Layout((2,), (2,)),
    Layout((LONG_ROWS,), (LONG_ROWS,)),
    Layout((2,), (3,), mask_width=2, num_visible=1),
)
_NO_PREBUILT = "FlashInfer has no prebuilt kernels for this model"
_INSTALL = (
    "run `flashinfer install-jit-cache-wheel`, or install the CUDA toolkit, whose nvcc compiles them (docs/gpu.md)"
)


class MissingModuleError(RuntimeError):
    """FlashInfer cannot load a module. The message is one line that says what to install."""


@cache
def warn_of_fa2(computed: str, reason: str) -> None:
    """Warn that fa2 computes something because fa3 cannot be loaded: once per process, whatever engines it makes."""
    logger.warning("fa2 computes %s, which is slower than fa3: %s", computed, reason)


def warn_of_another_toolkit() -> None:
    """Warn if the nvcc that FlashInfer would compile with is of another CUDA than torch's."""
    toolkit, torch_toolkit = (
        str(importlib.import_module("flashinfer.jit.cpp_ext").get_cuda_version()),
        torch.version.cuda,
    )
    if torch_toolkit is not None and toolkit.partition(".")[0] != torch_toolkit.partition(".")[0]:
        logger.warning(
            "nvcc is of CUDA %s, but torch of CUDA %s: kernels that are not prebuilt may fail to compile or to load; "
            "let CUDA_HOME name a toolkit of CUDA %s",
            *(toolkit, torch_toolkit, torch_toolkit.partition(".")[0]),
        )


def load_modules(
    backend: FlashInferBackend, norm_sizes: Collection[int], rotated: int = 0, activation: str = "silu"
) -> None:
    """Load the modules that a model needs for its forwards over this backend. Compiles those that are not prebuilt.

    Args:
        norm_sizes: row sizes of the model's norms, each of which is compiled.
        rotated: the head size that FlashInfer rotates; 0: none, because a kernel of our own does.
        activation: of the model's gates.

    Raises:
        MissingModuleError: one can be neither loaded nor compiled.
    """
    try:
        for layout in _FORWARDS:
            backend.plan(layout)
        keys = backend.pool.keys[0]
        _load_fused(keys.device, keys.dtype, norm_sizes, rotated, activation)
    except (OSError, RuntimeError) as error:
        reason = why_not_loaded(error)
        if reason is None:
            raise
        raise MissingModuleError(reason) from error


def why_not_loaded(error: BaseException) -> str | None:
    """What is missing, in one line, if FlashInfer raised `error` because it could not load a module. Else None."""
    if type(error).__name__ == "MissingJITCacheError":
        name = getattr(getattr(error, "spec", None), "name", "")
        return f"FLASHINFER_DISABLE_JIT is set, and no module {name} is prebuilt: unset it, or {_INSTALL}"
    words = str(error)
    if isinstance(error, FileNotFoundError) and error.filename == "ninja":
        return f"{_NO_PREBUILT}, and no ninja to compile them: pip install ninja"
    if re.search(r"Could not find nvcc|nvcc not found|nvcc: not found|nvcc: No such file", words):
        return f"{_NO_PREBUILT}, and no nvcc to compile them: {_INSTALL}"
    if "Ninja build failed" in words:
        lines = words.splitlines()
        shown = next((line for line in lines if "error" in line.lower()), lines[-1])
        return f"{_NO_PREBUILT}, and nvcc cannot compile them, perhaps for lack of headers: {shown.strip()[:200]}"
    return None


def _load_fused(
    device: torch.device,
    dtype: torch.dtype,
    norm_sizes: Collection[int],
    rotated: int = 0,
    activation: str = "silu",
) -> None:
    """Run every fused operation once, on one row."""
    with torch.inference_mode():
        for size in norm_sizes:
            row, weight = torch.zeros(2, size, dtype=dtype, device=device), torch.ones(size, dtype=dtype, device=device)
            fused.rms_norm(row[:1], weight, 1e-6)
            fused.add_rms_norm(row[:1], row[1:], weight, 1e-6)
        fused.GATES[activation](torch.zeros(1, 128, dtype=dtype, device=device))
        if rotated and fused.can_use_table(device, dtype, rotated, rotated):
            table = torch.zeros(1, rotated, dtype=torch.float32, device=device)
            rotation = fused.AngleTable(torch.zeros(1, dtype=torch.int64, device=device), table)
            q, k = torch.zeros(2, 1, 1, rotated, dtype=dtype, device=device)
            fused.apply_rope_pair(q, k, rotation)
