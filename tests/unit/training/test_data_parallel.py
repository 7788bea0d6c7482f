"""Two processes train as one does, and the second one writes nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_tools.training import data_parallel
from eagle_tools.training.__main__ import main
from eagle_tools.training.tiny import TinyPair, tiny_pair
from tests.support import deepseek
from tests.unit.training.test_capture import with_tokenizer
from tests.unit.training.test_packing import many_rows
from tests.unit.training.test_packing import write as write_rows

LAYERS = ("--aux-layers", "1", "2", "3")
FEW = ["--device", "cpu", "--texts", "1", "--length", "63", "--accumulate", "2"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), steps=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", many_rows(120))


def together(*commands: Sequence[str]) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of a process for each command; they train together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, command in enumerate(commands):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(commands))}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        where["TORCHELASTIC_RUN_ID"] = "test"
        program = [sys.executable, "-m", "eagle_tools.training", *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(program, env={**os.environ, **ranks, **where}, text=True, **pipes))
    found = []
    for process in started:
        out, err = process.communicate(timeout=300)
        found.append((process.returncode, out, err))
    return found


def curves(out: Path) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = json.loads((out / "curves.json").read_text())
    return found


def check_equal(one: Path, two: Path) -> None:
    assert curves(one).keys() == curves(two).keys()
    for name, points in curves(one).items():
        if "loss" in name:
            np.testing.assert_allclose(points, curves(two)[name], rtol=0, atol=1e-4)


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["eagle3", "medusa", "redrafter", "block", "mtp"])
def test_two_processes_have_the_loss_curve_of_one(stage: str, pair: TinyPair, data: Path, tmp_path: Path) -> None:
    target = pair.target
    if stage == "mtp":  # with experts, of which not all see a token in each process
        deepseek.save(*deepseek.random_pair(3, deepseek.GLM), tmp_path / "target", deepseek.GLM)
        target = with_tokenizer(tmp_path / "target", 64)
    layers = {"eagle3": LAYERS, "block": LAYERS[:-1]}.get(stage, ())
    command = [stage, "--target", str(target), "--data", str(data), *FEW, *layers]
    one, two, second = (tmp_path / name for name in ("one", "two", "second"))
    torch.set_num_threads(1)
    assert main([*command, "--steps", "3", "--out", str(one)]) == 0
    assert main([*command, "--steps", "11", "--out", str(one)]) == 0
    for steps in ("3", "11"):  # the second time the training goes on
        shared = [*command, "--steps", steps, "--out"]
        (status, said, _), (other, also, bar) = together([*shared, str(two)], [*shared, str(two)])
        assert status == other == 0
        assert "answers accept length" in said
        assert not also and "step/s" not in bar
    check_equal(one, two)
    assert [step for step, _ in curves(two)["train loss"]] == [0, 10]
    assert len(curves(two)["answers accept length"]) == (3 if stage == "mtp" else 2)
    apart = [*command, "--steps", "3", "--out"]
    assert [each[0] for each in together([*apart, str(tmp_path / "first")], [*apart, str(second)])] == [0, 0]
    assert (tmp_path / "first" / "config.json").is_file()
    assert not [path for path in second.rglob("*") if path.is_file()]


@pytest.mark.training
@pytest.mark.slow
def test_torchrun_trains_on_texts_that_the_first_process_sampled(pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    command = ["eagle3", "--target", str(pair.target), "--data", str(tmp_path / "text.txt"), *FEW, *LAYERS]
    command += ["--sampled-texts", "8", "--steps", "3", "--out"]
    torch.set_num_threads(1)
    assert main([*command, str(tmp_path / "one")]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    program = [*torchrun, "eagle_tools.training", *command, str(tmp_path / "two")]
    subprocess.run(program, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    check_equal(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--accumulate", "3"], "--accumulate 3: a multiple of the 2 processes is expected: 4"),
        (["--device", "cuda:0"], "--device cuda:0: every process has a GPU of its own; give --device cuda"),
    ],
)
def test_what_processes_cannot_share_is_refused(
    changed: list[str], message: str, pair: TinyPair, data: Path, tmp_path: Path
) -> None:
    command = ["eagle3", "--target", str(pair.target), "--data", str(data), *FEW, *LAYERS, *changed]
    command += ["--steps", "1", "--out", str(tmp_path / "head")]
    for status, _, err in together(command, command):
        assert status == 2
        assert message in err.splitlines()[-1]


def test_other_stages_are_not_shared(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    command = ["token-map", "--model-path", "x", "--data", str(data), "--size", "4", "--out", str(tmp_path / "map.pt")]
    assert main(command) == 2
    assert "token-map: one process computes it; start it without torchrun" in capsys.readouterr().err


def test_a_step_is_shared_and_the_first_process_has_the_last_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_parallel.share(range(8, 12)) == range(8, 12)
    monkeypatch.setattr(data_parallel, "size", lambda: 2)
    for rank, expected in ((0, [9, 11]), (1, [8, 10])):
        monkeypatch.setattr(data_parallel.dist, "get_rank", lambda rank=rank: rank)
        assert list(data_parallel.share(range(8, 12))) == expected
