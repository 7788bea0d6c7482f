"""The comparison with other engines: what runs, what is printed, and what a broken engine says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from eagle_tools import DEMO
from eagle_tools.bench import peers
from eagle_tools.bench.peer_engines import OPENVINO, OURS, VLLM, Spec
from eagle_tools.bench.peers import PeerSpeeds

ENGINE = f"""#!{sys.executable}
import json, sys
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({{"tokens": [each[:1] * request["tokens"] for each in request["prompts"]]}}), flush=True)
"""
BROKEN = f"#!{sys.executable}\nimport sys\nsys.exit('no such model')\n"


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def flags(tmp_path: Path, *more: str) -> list[str]:
    pair = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "eagle3"), "--out", str(tmp_path)]
    return [*pair, *more, "--rounds", "1", "--tokens", "6", "--threads", "1"]


@pytest.mark.deep
def test_engines_take_turns_and_keep_their_own_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = program(tmp_path / "python", ENGINE)
    assert peers.main([*flags(tmp_path, "--vllm", fake), "--steps", "0", "2", "--clients", "1", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("best against best") == 2
    document = json.loads((tmp_path / "peers.json").read_text())
    rows = document["2 requests at once"]
    assert [(row["engine"], row["format"], row["steps"]) for row in rows[:4]] == [
        (VLLM, "bf16", 0),
        (OURS, "bf16", 0),
        (OURS, "int8", 0),
        (OURS, "int4", 0),
    ]
    assert all(speed > 0 for row in rows for speed in row["tokens_per_second"])
    assert (tmp_path / "peers.png").stat().st_size > 5000


def test_a_broken_engine_is_named_with_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = program(tmp_path / "python", BROKEN)
    assert peers.main([*flags(tmp_path, "--vllm", broken), "--steps", "0"]) == 2
    error = capsys.readouterr().err
    assert "vLLM bf16: it ended; its log: " in error
    assert (tmp_path / "vLLM-bf16-0.log").read_text() == "no such model\n"


def test_exports_decide_what_openvino_runs(tmp_path: Path) -> None:
    for name in ("bf16", "int4"):
        (tmp_path / name).mkdir()
    given = ["--openvino", "python", "--openvino-models", str(tmp_path), "--steps", "0", "3"]
    arguments = peers._parser().parse_args([*flags(tmp_path), *given])
    assert [spec for spec in peers.specs(arguments) if spec.engine == OPENVINO] == [
        Spec(OPENVINO, "bf16", 0),
        Spec(OPENVINO, "int4", 0),
    ]
    (tmp_path / "draft").mkdir()
    assert Spec(OPENVINO, "int4", 3) in peers.specs(arguments)
    with pytest.raises(SystemExit):
        peers.main([*flags(tmp_path), "--openvino", "python"])


def test_ratios_are_to_the_best_of_the_same_format(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {(VLLM, "bf16", 3): 50.0, (OPENVINO, "bf16", 3): 80.0, (OPENVINO, "int4", 3): 100.0}
    speeds |= {(OURS, "bf16", 3): 100.0, (OURS, "int4", 3): 150.0, (OURS, "int4", 0): 70.0}
    texts = {3: [["a", "b"]], 0: [["a", "c"]]}
    timings = {Spec(*key): PeerSpeeds([speed], texts[key[2]]) for key, speed in speeds.items()}
    peers.print_table(timings, "8 requests at once", Console(width=110))
    printed = capsys.readouterr().out
    assert "100.0 (1.25 x)" in printed
    assert "150.0 (1.50 x)" in printed
    assert "1 of 2" in printed
    assert "best against best: eagle_server int4, 3 steps, over OpenVINO int4, 3 steps: 1.50 x" in printed


def test_prompts_are_texts_or_token_ids_of_one_length(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([list(range(80)), [1, 2, 3]]))
    assert peers.read_prompts(path, str(DEMO / "target")) == [list(range(peers.LENGTH))]
    path.write_text(json.dumps(["def f(x):\n"]))
    assert {len(each) for each in peers.read_prompts(path, str(DEMO / "target"))} == {peers.LENGTH}
