"""Build an image of docker/ and use it as its user would, on a machine without a container engine.

    python docker/check.py [--stand-in] [docker/Dockerfile.cuda] [-- OPTIONS OF BUILDAH BUILD]

It needs root and buildah (a Debian package), whose chroot isolation runs every step of the Dockerfile by itself. Where
the base image cannot be fetched, `--stand-in` makes one of that name from Debian's packages, by debootstrap: with
Python in /usr/local in place of python:3.11, and bare in place of nvidia/cuda. The GPU image is then one without CUDA,
which serves on the CPU; what pip would install in the real one is resolved beside it, without being fetched.

What this machine's pip needs goes in by mounts, never into the Dockerfile: `-- --volume /etc/pip.conf:/etc/pip.conf`.
The image is then started with its own entrypoint, environment and user, waited for with its own health check, asked for
a completion and stopped with SIGTERM. Exit status 0: all of that was as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEBIAN, MADE_FROM_DEBIAN = "bookworm", "localhost/debian:bookworm"
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UBUNTU_PYTHON, UBUNTU_GLIBC = "3.12", 39  # those of nvidia/cuda's Ubuntu 24.04: glibc 2.39
START_SECONDS, STOP_SECONDS = 300, 60
TOKENS = 16
DOCUMENTS = [f"/usr/share/doc/eagle-server/{name}" for name in ("sbom.cdx.json", "licenses.md")]
ISOLATION = ("--isolation", "chroot")


def main() -> int:
    arguments, build_options = split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path, nargs="?", default=ROOT / "docker" / "Dockerfile")
    parser.add_argument("--stand-in", action="store_true", help="make the base image from Debian's packages")
    given = parser.parse_args(arguments)
    if given.stand_in:
        base = base_of(given.dockerfile)
        make_base(base)
        if "/cuda:" in base:
            resolve()
    image = f"localhost/eagle-server:check-{given.dockerfile.name.lower()}"
    # No cache: buildah 1.28 mounts an empty directory where `from=` names a stage that its cache has.
    build = ("build", *ISOLATION, "--layers", "--no-cache", "--format", "docker", "--file", str(given.dockerfile))
    pull = ["--pull-never"] if given.stand_in else []
    buildah(*build, *pull, *build_options, "--tag", image, str(ROOT))
    config = json.loads(buildah("inspect", "--type", "image", image, capture=True))["Docker"]["config"]
    container = buildah("from", "--pull-never", image, capture=True)
    try:
        use(container, config)
    finally:
        buildah("rm", container, capture=True)
    print(f"ok; the image {image} is kept", flush=True)
    return 0


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def buildah(*words: str, capture: bool = False) -> str:
    print("+ buildah", *words, flush=True)
    done = subprocess.run(["buildah", *words], check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return done.stdout.strip() if capture else ""


def base_of(dockerfile: Path) -> str:
    """The full name of the one image that `dockerfile` starts from."""
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?", dockerfile.read_text(), re.MULTILINE)
    (name,) = {base for base, _ in stages} - {stage for _, stage in stages}
    return f"docker.io/{name if '/' in name else 'library/' + name}"


def make_base(name: str) -> None:
    """Commit Debian under the name of a base image, with Python in /usr/local where that image has it there."""
    if not buildah("images", "--quiet", "--filter", f"reference={MADE_FROM_DEBIAN}", capture=True):
        make_debian()
    container = buildah("from", "--pull-never", MADE_FROM_DEBIAN, capture=True)
    if "/python:" in name:
        python = "apt-get update && apt-get install --yes --no-install-recommends python3-venv netbase tzdata"
        # A virtual environment, since Debian's own Python refuses `pip install`.
        buildah("run", *ISOLATION, container, "--", "sh", "-c", f"{python} && python3 -m venv /usr/local")
    buildah("commit", "--quiet", "--rm", container, name)


def make_debian() -> None:
    with tempfile.TemporaryDirectory() as root:
        command = ("debootstrap", "--variant=minbase", "--include=ca-certificates", DEBIAN, root)
        print("+", *command, flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        container = buildah("from", "scratch", capture=True)
        buildah("add", "--quiet", container, root, "/")
    buildah("config", "--env", PATH, container)
    buildah("commit", "--quiet", "--rm", container, MADE_FROM_DEBIAN)


def resolve() -> None:
    """Have a new pip choose the GPU image's packages for its own Python and glibc, from their metadata alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = (*project["dependencies"], *project["optional-dependencies"]["cuda"])
    glibcs = (*(f"_2_{minor}" for minor in range(5, UBUNTU_GLIBC + 1)), "2014")  # pip adds 2010 and 1 to 2014
    platforms = [f"--platform=manylinux{glibc}_x86_64" for glibc in glibcs]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True, upgrade_deps=True)
        target = ("--target", f"{folder}/nothing", "--python-version", UBUNTU_PYTHON, "--only-binary", ":all:")
        command = (f"{folder}/bin/pip", "install", "--dry-run", *target, *platforms, *requirements)
        done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    print(done.stdout.splitlines()[-1], flush=True)


def use(container: str, config: dict[str, Any]) -> None:
    """Start, wait, ask, stop; an AssertionError says what was not as it should be."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = ["buildah", "run", *ISOLATION, container, "--"]
    command = [*config["Entrypoint"], "--port", str(port)]
    server = subprocess.Popen([*run, *command])
    try:
        wait_until_healthy(server, [*run, *config["Healthcheck"]["Test"][1:]])
        pid = process_of(server.pid, command)
        assert pid, "the server's process is not below buildah's"
        uid = int(re.findall(r"^Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])
        print(f"healthy, user {uid}", flush=True)
        assert str(uid) == config["User"].partition(":")[0] != "0", f"it runs as user {uid}, not {config['User']}"
        for volume in config["Volumes"]:
            subprocess.run([*run, "test", "-w", volume], check=True)
        for document in DOCUMENTS:
            subprocess.run([*run, "test", "-s", document], check=True)
        print(repr(complete(port)), flush=True)
        os.kill(pid, signal.SIGTERM)
        status = server.wait(STOP_SECONDS)
        assert status == 0, f"exit status {status} after SIGTERM"
    finally:
        if server.poll() is None:  # something was not as it should be: leave no server behind
            for left in (process_of(server.pid, command), server.pid):
                if left:
                    os.kill(left, signal.SIGKILL)


def wait_until_healthy(server: subprocess.Popen[bytes], check: list[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(check, capture_output=True, check=False).returncode != 0:
        assert server.poll() is None, f"the server ended with status {server.returncode}"
        assert time.monotonic() < deadline, f"not healthy within {START_SECONDS} s"
        time.sleep(1)


def process_of(ancestor: int, command: list[str]) -> int:
    """The process below `ancestor` that was started as `command`: the container's process 1, were there an engine."""
    threads = Path(f"/proc/{ancestor}/task").iterdir()  # a child is listed under the thread that started it
    for child in [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]:
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        found = child if words[1:] == command[1:] else process_of(child, command)  # buildah resolves the program
        if found:
            return found
    return 0


def complete(port: int) -> str:
    body = json.dumps({"prompt": "def fibonacci(n):\n", "max_tokens": TOKENS, "temperature": 0}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=START_SECONDS) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == TOKENS, answer
    return str(answer["choices"][0]["text"])


if __name__ == "__main__":
    sys.exit(main())
