"""Compile Triton kernels for Hopper on a machine without a GPU. Run it as a program, without Triton's interpreter.

Reads a JSON list of [module, kernel, signature, constants]. Writes a JSON list of error messages; "" is success.
"""

from __future__ import annotations

import importlib
import json
import sys


def compiled(module: str, name: str, signature: dict[str, str], constants: dict[str, object]) -> str:
    """The error message, or "" if the compiler made a program for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    types = {argument: signature.get(argument, "constexpr") for argument in kernel.arg_names}
    try:
        result = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
    except Exception as error:  # any compiler error is a result
        return f"{type(error).__name__}: {error}"
    return "" if result.asm["cubin"] else "no cubin"


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    json.dump([compiled(*case) for case in cases], sys.stdout)
