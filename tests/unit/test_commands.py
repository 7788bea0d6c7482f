"""The console: `serve`, `tree`, `bench`, `train`, and what a start says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle_server.__main__ import described, main
from eagle_tools import EXTRA

REPOSITORY = Path(__file__).parents[2]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 0
    return capsys.readouterr().out


def test_serve_takes_a_model_before_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(output(capsys, "serve", "owner/model", "--port", "8001", "--dry-run"))
    assert (document["model"]["model_path"], document["server"]["port"]) == ("owner/model", 8001)
    plain = json.loads(output(capsys, "serve", "--port", "8001", "--dry-run"))
    assert plain["server"] == json.loads(output(capsys, "--port", "8001", "--dry-run"))["server"]
    assert plain["model"]["served_model_name"] == "demo"


@pytest.mark.parametrize(("command", "word"), [("tree", "--prompt"), ("bench", "--concurrency"), ("train", "STAGE")])
def test_commands_have_their_own_help(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert word in output(capsys, command, "--help")


@pytest.mark.parametrize(("command", "word"), [("serve", "--model-path"), ("chat", "--url"), ("tree", "--prompt")])
def test_help_prints_the_help_of_a_command(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert word in output(capsys, "help", command)
    assert output(capsys, "help") == output(capsys, "--help")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "unknown command serv; did you mean serve?"),
        (["chta"], "unknown command chta; did you mean chat?"),
        (["run"], "unknown command run; eagle-server serve MODEL serves a model"),
        (["zzz"], "unknown command zzz; there are serve, chat, tree, bench, train, help"),
        (["help", "benhc"], "unknown command benhc; did you mean bench?"),
        (["help", "tree", "bench"], "help is for one command, not for tree bench"),
    ],
    ids=str,
)
def test_an_unknown_command_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"eagle_server: error: {message}")


@pytest.mark.parametrize("module", ["pydantic", "uvicorn", "tokenizers"])
def test_an_interrupt_while_modules_are_imported_is_no_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    search = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    command = [sys.executable, "-m", "eagle_server"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_interrupt_before_the_server_handles_signals_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle_server.__main__.parse_args", interrupted)
    assert main([]) == 130
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_serving_imports_no_torch() -> None:
    program = "import sys, eagle_server.__main__; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_the_banner_names_model_drafts_and_kv() -> None:
    resolved = {
        "model": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "quantization": "int8",
            "context_length": 4096,
        },
        "device": {"device": "cpu", "cpu_threads": 2, "cpu_kernels": "native"},
        "speculative": {
            "algorithm": "EAGLE3",
            "num_steps": 3,
            "eagle_topk": 4,
            "num_draft_tokens": 13,
            "adaptive": None,
        },
        "cache": {"max_total_tokens": 50000},
        "scheduler": {"max_running_requests": 48},
    }
    assert described(resolved) == [
        "model       LlamaForCausalLM, bfloat16 int8, on cpu, threads: 2, kernels: native",
        "drafts      EAGLE3, 3 steps, topk 4, 13 nodes at most; trees follow cost and load",
        "KV          50,000 tokens, 4,096 at most for a request, 48 requests at once",
    ]
    resolved["speculative"] = {"algorithm": "NONE"}
    assert described(resolved)[1] == "drafts      none: plain decoding"
    resolved["cache"] = {"max_total_tokens": 50000, "state_checkpoints": 196}
    assert described(resolved)[2].endswith("48 requests at once, 196 checkpoints of states")
    assert described({"dtype": "float32"}) == []


def run_programs(calls: list[list[str]], without: Sequence[str]) -> list[tuple[int, str, str]]:
    """Run modules with arguments as `python -m` does, all in one process without these packages.

    Returns status, stdout and stderr of each.
    """
    program = f"""
import contextlib, io, json, runpy, sys
sys.modules.update(dict.fromkeys({list(without)!r}))
done = []
for module, *arguments in json.loads(sys.argv[1]):
    sys.modules.pop(f"{{module}}.__main__", None)  # imported by `eagle-server`
    sys.argv, out, err, status = [module, *arguments], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    done.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""
    command = [sys.executable, "-c", program, json.dumps(calls)]
    shown = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True)
    return [tuple(each) for each in json.loads(shown.stdout)]


def test_a_program_without_the_extra_says_so_before_it_begins(tmp_path: Path) -> None:
    paths = sorted((REPOSITORY / "eagle_tools" / "bench").rglob("*.py"))
    benchmarks = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in paths
        if 'if __name__ == "__main__"' in (text := path.read_text()) and "rich_output" in text
    ]
    assert len(benchmarks) > 10  # the others need less
    calls = {
        "bench": [["eagle_server", "bench"], *([name.removesuffix(".__main__")] for name in benchmarks)],
        "chat": [["eagle_server", "chat"]],
        "tree": [["eagle_server", "tree"]],
        "train": [
            [*train, "tokenizer", "--work", str(tmp_path)]
            for train in (["eagle_server", "train"], ["eagle_tools.training"])
        ],
        "tree_search": [["eagle_tools.training.tree_search", "--out", str(tmp_path / "tree")]],
    }
    named = [(name, call) for name, programs in calls.items() for call in programs]
    for (name, call), done in zip(named, run_programs([call for _, call in named], EXTRA), strict=True):
        line = f"eagle_server: error: {name} needs httpx and matplotlib and rich: pip install 'eagle-server[tools]'\n"
        assert done == (2, "", line), call
    assert list(tmp_path.iterdir()) == []
    [gpu] = run_programs([["eagle_tools.bench.gpu", "--out", str(tmp_path / "gpu")]], EXTRA)
    assert gpu == (2, "", "eagle_server: error: bench.gpu needs matplotlib: pip install 'eagle-server[tools]'\n")


def test_the_extra_is_what_is_checked() -> None:
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["tools"]
    assert {requirement.partition(">")[0] for requirement in needed} == set(EXTRA)


def test_help_needs_neither_the_extra_nor_torch_and_names_one_program() -> None:
    calls = [
        ["eagle_server", *command, "--help"] for command in ([], ["chat"], ["tree"], ["train"], ["train", "block"])
    ]
    calls += [["eagle_tools.training", "--help"], ["eagle_tools.training.tree_search", "--help"]]
    for call, (status, shown, error) in zip(
        calls, run_programs(calls, [*EXTRA, "torch", "transformers", "numpy"]), strict=True
    ):
        assert (status, error) == (0, ""), call
        [usage] = re.findall(r"^usage: (.*)", shown)
        expected = {
            "eagle_server": " ".join(["eagle-server", *call[1:-1]]),
            "eagle_tools.training": "eagle-server train",
            "eagle_tools.training.tree_search": "python -m eagle_tools.training.tree_search",
        }[call[0]]
        assert usage.startswith(f"{expected} "), call
        assert not re.search(r"python -m eagle_(server|tools\.(chat|tree|bench|training))\b(?!\.)", shown), call


def test_a_server_imports_no_tools() -> None:
    """Neither those nor their packages, in the process of the API or in that of the engine."""
    blocked = dict.fromkeys(("eagle_tools", "rich", "matplotlib"))
    program = f"import sys; sys.modules.update({blocked!r}); import eagle_server.__main__"
    program += ", eagle_server.engine.assembly.from_config"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)
