"""The wheel and the source distribution: built, checked, installed into a fresh environment, and served from there."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import FIXED_TREES, README_FLAGS, REPOSITORY, serving

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(find_spec("build") is None, reason="needs build: pip install -e '.[test]'"),
]
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "kernels",
    "eagle_server",
    "eagle_tools",
)
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


def run(*words: str | Path, **keywords: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **keywords)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both. The wheel is built from the unpacked source distribution, so that one is complete."""
    folder = tmp_path_factory.mktemp("packages")
    for name in SOURCES:
        source, copy = REPOSITORY / name, folder / "sources" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "built"))
        else:
            shutil.copy(source, copy)
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "sources")
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with nothing but the wheel, which finds its dependencies in that of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    return folder / "bin"


def test_both_pass_twines_strict_check(built: Path) -> None:
    packages = sorted(built.iterdir())
    assert [path.name for path in packages] == [
        f"eagle_server-{VERSION}-py3-none-any.whl",
        f"eagle_server-{VERSION}.tar.gz",
    ]
    run(sys.executable, "-m", "twine", "check", "--strict", *packages)


def test_both_have_every_file_of_the_package_and_of_the_kernels(built: Path) -> None:
    def below(folder: str) -> set[str]:
        files = run("git", "ls-files", folder, cwd=REPOSITORY).split()
        return {name for name in files if not Path(name).name.startswith(".")}

    package, kernels = below("eagle_server") | below("eagle_tools"), below("kernels")
    wheel = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    assert package | {f"eagle_server/ops/{name}" for name in kernels} <= wheel
    with tarfile.open(next(built.glob("*.tar.gz"))) as sources:
        archive = {name.partition("/")[2] for name in sources.getnames()}
    assert package | kernels <= archive
    assert not any(name.startswith("tests") for name in wheel | archive)


def test_the_installed_wheel_serves(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    place = run(installed / "python", "-c", "import eagle_server; print(eagle_server.__file__)", cwd=tmp_path)
    assert place.startswith(str(installed.parent))
    assert run(installed / "eagle-server", "--version").split()[-1] == VERSION

    with serving(
        tmp_path / "log", *README_FLAGS, *FIXED_TREES, program=(str(installed / "eagle-server"), "serve")
    ) as up:
        body = {"prompt": "def fibonacci(n):\n", "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        page = httpx.get(up.url, headers={"accept": "text/html"})
        assert page.headers["content-type"].startswith("text/html")
        assets = re.findall(r'(?:src|href)="(/?playground/[^"]+)"', page.text)
        assert {name.rpartition(".")[2] for name in assets} >= {"js", "css"}
        assert all(httpx.get(f"{up.url}/{name.lstrip('/')}").status_code == 200 for name in assets)
        resolved = httpx.get(f"{up.url}/v1/server_info").json()["resolved"]
        assert resolved["device"]["cpu_kernels"] == "native"  # found in the wheel, and compiled unless that is done
        assert resolved["model"]["model_path"].startswith(str(installed.parent))


LIBRARY = b"\x7fELF\0GLIBC_2.2.5\0GLIBC_%s\0GLIBCXX_3.4.%s\0"


@pytest.mark.parametrize(
    ("glibc", "libstdcxx", "tag"),
    [
        (b"2.27", b"22", "manylinux_2_28_{machine}"),  # torch needs 2.28
        (b"2.35", b"24", "manylinux_2_35_{machine}"),
        (b"2.27", b"29", "linux_{machine}"),
        (None, None, "any"),
    ],
)
def test_a_wheel_with_libraries_is_for_the_platforms_that_can_load_them(
    glibc: bytes | None, libstdcxx: bytes | None, tag: str, tmp_path: Path
) -> None:
    folder, expected = tmp_path / "sources", tag.format(machine=platform.machine())
    shutil.copytree(REPOSITORY / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("built"))
    shutil.copy(REPOSITORY / "setup.py", folder)
    (folder / "README.md").write_text("")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    data = project["package-data"]["eagle_server.ops.kernels"]
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "eagle-server"
version = "1"
[tool.setuptools]
packages = ["eagle_server.ops.kernels"]
package-dir = {{"eagle_server.ops.kernels" = "kernels"}}
package-data = {{"eagle_server.ops.kernels" = {data}}}
include-package-data = {str(project["include-package-data"]).lower()}
"""
    )
    if glibc is not None:
        (folder / "kernels" / "built").mkdir()
        (folder / "kernels" / "built" / "avx2-0.so").write_bytes(LIBRARY % (glibc, libstdcxx))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", tmp_path, folder)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"eagle_server-1-py3-none-{expected}.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert ("eagle_server/ops/kernels/built/avx2-0.so" in names) == (glibc is not None)
    assert f"Tag: py3-none-{expected}\n" in zipfile.ZipFile(wheel).read("eagle_server-1.dist-info/WHEEL").decode()
