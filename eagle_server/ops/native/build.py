"""Compiles kernels/cpu for this machine, once: the library is kept in a cache, by sources, compiler and processor.

Where there is no compiler, libraries that were built before serve:
`python -m eagle_server.ops.native.build kernels/built` makes them for several processors, and a wheel built then has
them. Without those the torch twins compute everything.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eagle_server.ops.whole_file import put_whole

OPS = Path(__file__).parents[1]
SOURCES = next((path for path in (OPS / "kernels", OPS.parents[1] / "kernels") if path.is_dir()), OPS) / "cpu"
BUILT = SOURCES.parent / "built"
_USER_CACHE = Path(os.path.expandvars("$XDG_CACHE_HOME"))  # as it is written if there is no such variable
CACHE = (_USER_CACHE if _USER_CACHE.is_absolute() else Path("~/.cache")) / "eagle_server" / "kernels"
_NATIVE = "-march=native"
_FLAGS = ("-std=c++2a", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
_TIMEOUT = 300  # seconds, for the compiler
_LEAST_SPACE = 2**26  # bytes that must be free where the library is kept; it has about a tenth


@dataclass(frozen=True)
class Variant:
    """A processor to build for: the compiler's flags, and what /proc/cpuinfo must list."""

    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})  # x86-64-v3; "abm" is LZCNT
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_VNNI, _BF16 = _AVX512 | {"avx512_vnni"}, _AVX512 | {"avx512_vnni", "avx512_bf16"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
VARIANTS = {  # of a kind of machine, best first
    "x86_64": {
        "amx": Variant(
            (*_BF16_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16"), _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}
        ),
        "avx512_bf16": Variant(_BF16_FLAGS, _BF16),
        "avx512_vnni": Variant(_VNNI_FLAGS, _VNNI),
        "avx2": Variant(("-march=x86-64-v3",), _AVX2),
        "x86_64": Variant((), frozenset()),
    },
    "aarch64": {
        "i8mm": Variant(("-march=armv8.2-a+i8mm",), frozenset({"atomics", "i8mm"})),
        "aarch64": Variant((), frozenset()),
    },
}

logger = logging.getLogger(__name__)


class BuildError(ValueError):
    """The kernels cannot be compiled or loaded here. The message says why."""


@cache
def library() -> ctypes.CDLL:
    """The kernels for this machine: compiled now if it has not done that yet, or else built before.

    Raises:
        BuildError: there is no compiler, it fails, or the library cannot be kept or loaded.
    """
    if platform.system() != "Linux":
        raise BuildError(f"kernels/cpu is for Linux, this is {platform.system()}")
    try:
        return _compiled(_compiler())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        path = _built_before()
        if path is None:
            raise BuildError(str(error)) from None
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as unusable:
            raise BuildError(f"{error}; the library that was built before cannot be loaded: {unusable}") from None
        logger.info("CPU kernels: %s, which was built before; it is not compiled here: %s", path.name, error)
        return loaded


def _compiled(compiler: str) -> ctypes.CDLL:
    """The library where it is kept, or else compiled into the first directory that can keep it."""
    name, reasons = f"{_key(compiler)}.so", list[OSError]()
    for directory in sorted(directories(CACHE, "kernels"), key=lambda directory: not (directory / name).is_file()):
        try:
            loaded = _loaded(directory / name)
        except OSError as error:
            reasons.append(error)
        else:
            logger.info("CPU kernels: compiled by %s for this processor, kept in %s", compiler, directory)
            return loaded
    raise reasons[0] if reasons else OSError("there is no directory to keep the kernels in")


def directories(cache: Path, name: str) -> list[Path]:
    """Where things of this name may be kept: in `cache`, or if that cannot be used among temporary files."""
    found = []
    with suppress(RuntimeError):  # there is no home
        found.append(cache.expanduser())
    with suppress(OSError):
        found.append(Path(tempfile.gettempdir()) / f"eagle_server-{name}-{os.getuid()}")
    return found


def compile_kernels(output: Path, flags: Sequence[str] = (_NATIVE,)) -> None:
    """Compile kernels/cpu to the library `output`. `flags` say for which processor.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    command = [_compiler(), *_FLAGS, *flags, str(SOURCES / "kernels.cpp"), "-o", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"kernels/cpu cannot be compiled ({error})") from None
    if done.returncode:
        raise BuildError(f"{command[0]} fails: {_reason(done.stderr)}")


def _reason(output: str) -> str:
    """The line of a compiler's output that says why it failed. "ld returned 1" does not: the line before it does."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("collect2:")]
    wanted = ("no space left", "error:", "error")
    found = (line for word in wanted for line in lines if word in line.lower())
    return next(found, lines[-1] if lines else "it does not say why")


def build_variants(directory: Path) -> None:
    """Compile a library for each of the `VARIANTS` of this kind of machine, in place of those that are there.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.so"):
        path.unlink()
    for name, variant in _variants().items():
        compile_kernels(directory / _file_of(name), variant.flags)


def _file_of(variant: str) -> str:
    """The file of a variant of these sources. One of other sources has another name, and is not loaded."""
    return f"{variant}-{_sources()[:8]}.so"


def _variants() -> dict[str, Variant]:
    machine = platform.machine()
    return VARIANTS.get(machine, {machine: Variant((), frozenset())})


def _built_before() -> Path | None:
    """The best of the libraries that were built before."""
    has = set(_processor().split())
    paths = (BUILT / _file_of(name) for name, variant in _variants().items() if variant.needs <= has)
    return next((path for path in paths if path.is_file()), None)


def _loaded(path: Path) -> ctypes.CDLL:
    """The library at this path. It is compiled if it is not there, is damaged, or cannot be loaded.

    Raises:
        OSError: the directory cannot be used.
        BuildError: the library cannot be compiled, or might be another user's.
    """
    _put_library(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("%s: it is compiled again", error)
        path.unlink()
        _put_library(path)
        return ctypes.CDLL(str(path))


def _put_library(path: Path) -> None:
    """Compile the library if it is not there whole. Several processes may do so at once. Raises as `_loaded`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(path.parent)
        if not _is_whole(path):
            if shutil.disk_usage(path.parent).free < _LEAST_SPACE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            logger.info("compiling the kernels for this processor, once; this may take half a minute")
            began = time.perf_counter()
            put_whole(path, _compile_sealed)
            logger.info("compiled them in %.1f s into %s", time.perf_counter() - began, path)
        check_owner(path)
    except OSError as error:
        raise OSError(f"{path.parent} cannot be used ({error})") from None


def _compile_sealed(path: Path) -> None:
    """Compile the kernels to `path`, and add the digest of the library. What loads it ignores bytes after its end."""
    compile_kernels(path)
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())


def _is_whole(path: Path) -> bool:
    """Whether the file is as it was written. The loader would not notice a page of zeros, and the process would die."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    whole = len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]
    if not whole:
        logger.warning("%s is damaged", path)
    return whole


def check_owner(path: Path) -> None:
    """What is there is trusted, code above all: nobody else may have put it there."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BuildError(f"{path} belongs to another user, or others may write it: remove it")


def _compiler() -> str:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError("there is no C++ compiler (Debian: apt-get install g++)")
    return found


def _key(compiler: str) -> str:
    """A name for what the library depends on: sources, flags, compiler and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=_TIMEOUT).stdout
    parts = (_sources().encode(), _NATIVE.encode(), compiler.encode(), version, _processor().encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def _sources() -> str:
    """A digest of the sources and of the flags that every library is compiled with."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.glob("*.*")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Model and instruction sets of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("vendor_id", "model", "flags", "Features")))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: the directory that gets the libraries."""
    parser = argparse.ArgumentParser(description="Compile kernels/cpu for each kind of processor.")
    parser.add_argument("directory", type=Path, help="kernels/built in a clone: a wheel that is built then has them")
    build_variants(parser.parse_args(arguments).directory)


if __name__ == "__main__":
    main()
