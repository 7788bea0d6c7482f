"""Build docker/Dockerfile and use the image as its user would, on a machine without a container engine.

    python docker/check.py [--base DIRECTORY] [-- OPTIONS OF BUILDAH BUILD]

It needs root and buildah (a Debian package), whose chroot isolation runs every step of the Dockerfile by itself. Where
no registry can be reached, the base image is made from a directory that holds Debian's Python, for example:

    debootstrap --include=python3,python3-pip,ca-certificates bookworm base
    ln -s /usr/bin/python3 base/usr/local/bin/python

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
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
IMAGE = "localhost/eagle-server:check"
START_SECONDS, STOP_SECONDS = 300, 60
TOKENS = 16
ISOLATION = ("--isolation", "chroot")


def main() -> int:
    arguments, build_options = split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a root directory to make the Dockerfile's base image from")
    base = parser.parse_args(arguments).base
    if base:
        make_base(base)
    build = ("build", *ISOLATION, "--layers", "--format", "docker", *(["--pull-never"] if base else []))
    buildah(*build, *build_options, "--file", str(DOCKERFILE), "--tag", IMAGE, str(ROOT))
    config = json.loads(buildah("inspect", "--type", "image", IMAGE, capture=True))["Docker"]["config"]
    container = buildah("from", IMAGE, capture=True)
    try:
        use(container, config)
    finally:
        buildah("rm", container, capture=True)
    print(f"ok; the image {IMAGE} is kept", flush=True)
    return 0


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def buildah(*words: str, capture: bool = False) -> str:
    print("+ buildah", *words, flush=True)
    done = subprocess.run(["buildah", *words], check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return done.stdout.strip() if capture else ""


def make_base(directory: Path) -> None:
    """Commit `directory` under the name of the Dockerfile's base image."""
    (name,) = set(re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE))
    container = buildah("from", "scratch", capture=True)
    buildah("add", "--quiet", container, str(directory), "/")
    buildah("config", "--env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    buildah("commit", "--quiet", "--rm", container, f"docker.io/library/{name}")


def use(container: str, config: dict[str, Any]) -> None:
    """Start, wait, ask, stop; an AssertionError says what was not as it should be."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = ["buildah", "run", *ISOLATION, "--env", f"EAGLE_SERVER_PORT={port}", container, "--"]
    server = subprocess.Popen([*run, *config["Entrypoint"]])
    try:
        wait_until_healthy(server, [*run, *config["Healthcheck"]["Test"][1:]])
        pid = process_of(server.pid, config["Entrypoint"])
        assert pid, "the server's process is not below buildah's"
        uid = int(re.findall(r"^Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])
        print(f"healthy, user {uid}", flush=True)
        assert str(uid) == config["User"].partition(":")[0] != "0", f"it runs as user {uid}, not {config['User']}"
        print(repr(complete(port)), flush=True)
        os.kill(pid, signal.SIGTERM)
        status = server.wait(STOP_SECONDS)
        assert status == 0, f"exit status {status} after SIGTERM"
    finally:
        if server.poll() is None:  # something was not as it should be: leave no server behind
            for left in (process_of(server.pid, config["Entrypoint"]), server.pid):
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
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == TOKENS, answer
    return str(answer["choices"][0]["text"])


if __name__ == "__main__":
    sys.exit(main())
