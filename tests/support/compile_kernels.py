"""Compile Triton kernels for Hopper on a machine without one. Run as a program, in a process without the interpreter.

Reads a list of [module, kernel, signature, constants] as JSON, writes a list of what the compiler said: "" is success.
"""

from __future__ import annotations

import importlib
import json
import sys


def compiled(module: str, name: str, signature: dict[str, str], constants: dict[str, object]) -> str:
    """The error, or "" if a program for sm_90 came out."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    types = {argument: signature.get(argument, "constexpr") for argument in kernel.arg_names}
    try:
        result = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
    except Exception as error:  # whatever the compiler says is the result
        return f"{type(error).__name__}: {error}"
    return "" if result.asm["cubin"] else "no cubin"


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    json.dump([compiled(*case) for case in cases], sys.stdout)
