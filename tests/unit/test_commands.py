"""The console: `serve`, `tree`, `bench`, `train`, and what a start says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from eagle_server.__main__ import main
from eagle_server.api.banner import described


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
    assert described({"dtype": "float32"}) == []
