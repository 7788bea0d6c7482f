"""The compiled kernels are kept for later starts, and are compiled again where what was kept is damaged."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_server.ops.native import build
from eagle_server.ops.native.build import BuildError, compile_kernels
from eagle_server.ops.whole_file import put_whole

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
# As large as several pages of memory, so that a file may be cut at one.
SOURCE = 'extern "C" { const char filling[40000] = {1}; int answer() { return 42; } }\n'
ROOT = Path(build.__file__).parents[3]


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Kernels that compile in no time."""
    directory = tmp_path / "cpu"
    directory.mkdir()
    (directory / "kernels.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", directory)
    monkeypatch.setattr(build, "CACHE", tmp_path / "kept")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return directory


def load() -> ctypes.CDLL:
    """As a new process does it."""
    return build.library.__wrapped__()


def put(directory: Path) -> Path:
    """Compile the library into a directory, without loading it: this process must not map what will be damaged."""
    path = directory / f"{build._key(build._compiler())}.so"
    build._put_library(path)
    return path


def kept(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "kept").iterdir()
    return path


def test_the_second_start_loads_what_the_first_one_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().answer() == 42
    before = kept(tmp_path).stat()
    monkeypatch.setattr(build, "compile_kernels", lambda path: pytest.fail("compiled twice"))
    assert load().answer() == 42
    assert kept(tmp_path).stat().st_ino == before.st_ino


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o022, 0o077])
def test_later_starts_load_it_whatever_the_umask_is(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        assert load().answer() == 42
        assert kept(tmp_path).stat().st_mode & 0o777 == 0o755
        assert load().answer() == 42
    finally:
        os.umask(before)


def hole(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(8192))


def changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "one page": lambda path: os.truncate(path, 4096),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "all but a few bytes": lambda path: os.truncate(path, path.stat().st_size - 3),
    "a hole of zeros": hole,
    "a bit": changed,
    "no digest": lambda path: os.truncate(path, path.stat().st_size - 32),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, sources: Path
) -> None:
    put(build.CACHE)
    DAMAGES[damage](kept(tmp_path))
    assert load().answer() == 42
    assert "is damaged" in caplog.text
    assert build._is_whole(kept(tmp_path))


def test_a_library_that_cannot_be_loaded_is_compiled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put(build.CACHE)
    content = b"of another machine"
    path.write_bytes(content + build.hashlib.sha256(content).digest())
    assert load().answer() == 42
    assert "it is compiled again" in caplog.text


@pytest.mark.parametrize("damaged", [False, True])
def test_several_starts_at_once(damaged: bool, tmp_path: Path, sources: Path) -> None:
    if damaged:
        os.truncate(put(build.CACHE), 5000)
    script = f"""
from pathlib import Path
from eagle_server.ops.native import build
build.SOURCES, build.CACHE = Path({str(sources)!r}), Path({str(tmp_path / "kept")!r})
assert build.library().answer() == 42
"""
    starts = [subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) for _ in range(4)]
    assert [start.wait(120) for start in starts] == [0] * 4
    assert build._is_whole(kept(tmp_path)), "one file, and nothing unfinished"


def test_what_is_not_finished_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise OSError("the disk is full")

    (tmp_path / "kept.txt").write_text("old")
    with pytest.raises(OSError, match="full"):
        put_whole(tmp_path / "kept.txt", fails)
    assert (tmp_path / "kept.txt").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"cpu", "kept.txt"}


def test_a_library_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match="others may write it"):
        put(tmp_path)


@pytest.mark.parametrize("kind", ["a file in its way", "full", "no home"])
def test_without_a_cache_it_is_kept_among_temporary_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "a file in its way":
        (tmp_path / "kept").write_text("")
    elif kind == "full":
        free, usage = build.shutil.disk_usage(tmp_path), build.shutil.disk_usage
        full = type(free)(free.total, free.total, 0)
        monkeypatch.setattr(build.shutil, "disk_usage", lambda path: full if path.name == "kept" else usage(path))
    else:
        monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("no home")))
    assert load().answer() == 42
    (library,) = (tmp_path / "temporary").glob("eagle_server-kernels-*/*.so")
    assert library.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(build, "compile_kernels", lambda path: pytest.fail("compiled twice"))
    assert load().answer() == 42


def test_without_any_directory_the_reason_is_that_of_the_first_one(tmp_path: Path) -> None:
    for name in ("kept", "temporary"):
        (tmp_path / name).write_text("")
    with pytest.raises(BuildError, match="kept cannot be used"):
        load()


def test_the_cache_follows_the_users_variable() -> None:
    code = "from eagle_server.ops.native import build; print(build.CACHE)"
    for value, path in (("/var/cache/x", "/var/cache/x/eagle_server/kernels"), ("", "~/.cache/eagle_server/kernels")):
        env = {**os.environ, "XDG_CACHE_HOME": value}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == path


def test_compiling_is_announced_before_it_begins(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    monkeypatch.setattr(build, "compile_kernels", lambda path: (said.append(caplog.text), compile_kernels(path)))
    with caplog.at_level("INFO"):
        load()
    assert "compiling the kernels for this processor, once" in said[0]
    assert "compiled them in" in caplog.text


def test_a_failing_compiler_is_quoted(tmp_path: Path, sources: Path) -> None:
    (sources / "kernels.cpp").write_text("#error not today\n")
    with pytest.raises(BuildError, match="not today"):
        compile_kernels(tmp_path / "out.so")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status\n",
            "/usr/bin/ld: final link failed: No space left on device",
        ),
        ("/tmp/x.s: Assembler messages:\n/tmp/x.s: Fatal error: cannot write\n", "/tmp/x.s: Fatal error: cannot write"),
        ("a.h:1: warning: w\na.h:2:1: error: unknown type\n", "a.h:2:1: error: unknown type"),
        ("killed\n", "killed"),
        ("", "it does not say why"),
    ],
)
def test_the_reason_is_the_line_that_says_why(output: str, reason: str) -> None:
    assert build._reason(output) == reason
