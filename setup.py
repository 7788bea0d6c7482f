"""Names the platform of a wheel that has compiled kernels. All else is in pyproject.toml."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

BUILT = Path(__file__).parent / "kernels" / "built"
LEAST = (2, 28)  # torch's wheels are for this glibc, so an older one is of no use
NEWEST_GLIBCXX = (3, 4, 24)  # what manylinux_2_28 promises of libstdc++


def versions(content: bytes, library: str) -> list[tuple[int, ...]]:
    """The versions of `library` ("GLIBC" or "GLIBCXX") that a compiled library asks for."""
    names = re.findall(rb"\0%b_([0-9.]+)(?=\0)" % library.encode(), content)
    return [tuple(int(part) for part in name.split(b".")) for name in names]


def platform_of(contents: Iterable[bytes]) -> str:
    """The wheel's tag for these libraries of this machine: "any" if there are none.

    "manylinux_2_28_x86_64" runs where glibc is 2.28 or newer. "linux_x86_64", which indices refuse, is for libraries
    that ask for a newer libstdc++ than such a system promises.
    """
    content = b"".join(contents)
    if not content:
        return "any"
    if max(versions(content, "GLIBCXX"), default=()) > NEWEST_GLIBCXX:
        return f"linux_{platform.machine()}"
    major, minor = max([LEAST, *versions(content, "GLIBC")])[:2]
    return f"manylinux_{major}_{minor}_{platform.machine()}"


class TaggedWheel(bdist_wheel):
    """A wheel for any Python 3, and for the platforms on which its kernels run."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", platform_of(path.read_bytes() for path in sorted(BUILT.glob("*.so")))


if __name__ == "__main__":
    setup(cmdclass={"bdist_wheel": TaggedWheel})
