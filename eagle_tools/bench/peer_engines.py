"""The engines that `bench.peers` compares: this server over HTTP, others in child processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle_tools.bench.servers import BenchError, Server, running

OURS, VLLM, OPENVINO = "eagle_server", "vLLM", "OpenVINO"
FORMATS = ("bf16", "int8", "int4")

Prompts = list[list[int]]
Texts = list[Any]  # comparable within one engine


@dataclass(frozen=True)
class Spec:
    """An engine, the format of its weights, and the length of the drafted chain; 0: plain decoding."""

    engine: str
    format: str
    steps: int

    def __str__(self) -> str:
        return f"{self.engine} {self.format}"


class Loaded(Protocol):
    """An engine that answers."""

    def generate(self, prompts: Prompts, tokens: int) -> Texts: ...


class Peer:
    """Another engine in a child process."""

    def __init__(self, process: subprocess.Popen[str], name: str, log: Path) -> None:
        self._process, self._name, self._log = process, name, log
        self._answer()

    def generate(self, prompts: Prompts, tokens: int) -> Texts:
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "tokens": tokens}), file=self._process.stdin, flush=True)
        texts: Texts = self._answer()["tokens"]
        return texts

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise BenchError(f"{self._name}: {answer['error']}; its log: {self._log}")
        return answer


@dataclass(frozen=True)
class Ours:
    """This server, over HTTP."""

    server: Server

    def generate(self, prompts: Prompts, tokens: int) -> Texts:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, tokens), prompts))

    def _complete(self, prompt: list[int], tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        url, headers = f"http://127.0.0.1:{self.server.port}/v1/completions", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
            text: str = json.load(response)["choices"][0]["text"]
        return text


@contextmanager
def loaded(spec: Spec, arguments: argparse.Namespace) -> Iterator[Loaded]:
    """Start an engine, stop it at the end."""
    if spec.engine == OURS:
        with running(str(spec), [*_server_flags(spec, arguments), *arguments.server_flags]) as server:
            yield Ours(server)
        return
    log = arguments.out / f"{spec.engine}-{spec.format}-{spec.steps}.log"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        log.open("w") as errors,
        subprocess.Popen(_worker_command(spec, arguments), stderr=errors, text=True, **pipes) as process,
    ):
        try:
            yield Peer(process, str(spec), log)
        finally:
            process.kill()


def _server_flags(spec: Spec, arguments: argparse.Namespace) -> list[str]:
    flags = ["--model-path", arguments.target, "--dtype", "bfloat16", "--disable-radix-cache"]
    flags += ["--cpu-threads", str(arguments.threads)]
    flags += [] if spec.format == "bf16" else ["--quantization", spec.format]
    if spec.steps == 0:
        return [*flags, "--speculative-algorithm", "NONE"]
    chain = ["--topk", "1", "--speculative-num-steps", str(spec.steps)]
    return [*flags, "--speculative-draft-model-path", arguments.draft, *chain]


def _worker_command(spec: Spec, arguments: argparse.Namespace) -> list[str]:
    variables = ["HF_HUB_OFFLINE=1", f"OMP_NUM_THREADS={arguments.threads}"]
    if spec.engine == VLLM:
        python, target, draft = arguments.vllm, arguments.target, arguments.draft
        variables += [f"VLLM_CPU_OMP_THREADS_BIND=0-{arguments.threads - 1}", "VLLM_CPU_KVCACHE_SPACE=1"]
        variables += ["VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_USE_AOT_COMPILE=0"]
        variables += [f"LD_PRELOAD={':'.join(arguments.vllm_preload)}"] if arguments.vllm_preload else []
    else:
        exported: Path = arguments.openvino_models
        rounded = spec.format != "bf16" and (exported / "draft-int8").is_dir()
        python, target = arguments.openvino, str(exported / spec.format)
        draft = str(exported / ("draft-int8" if rounded else "draft"))
    command = [python, str(Path(__file__).with_name("peer_worker.py")), spec.engine.lower(), target]
    command += ["--threads", str(arguments.threads)]
    return ["env", *variables, *command, *(["--draft", draft, "--steps", str(spec.steps)] if spec.steps else [])]


def specs(arguments: argparse.Namespace) -> list[Spec]:
    """The engines to run, by chain length."""
    specs = []
    for steps in arguments.steps:
        if arguments.openvino:
            exported: Path = arguments.openvino_models
            drafts = steps == 0 or (exported / "draft").is_dir()
            specs += [Spec(OPENVINO, format, steps) for format in FORMATS if drafts and (exported / format).is_dir()]
        if arguments.vllm:
            specs.append(Spec(VLLM, "bf16", steps))
        specs += [Spec(OURS, format, steps) for format in FORMATS]
    return specs
