"""The search over a tiny pair: what it measures, writes and prints; the server accepts the tree it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_server.config import parse_args
from eagle_server.config.commands import without_drafting
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.speculation.static_tree import read_choices
from eagle_server.text.tokenizer import load_tokenizer
from eagle_tools.training.__main__ import main as train
from eagle_tools.training.tiny import TinyPair, tiny_medusa, tiny_pair
from eagle_tools.training.tree_search.__main__ import main
from eagle_tools.training.tree_search.texts import PIECE, prompts_of
from tests.support.engines import request, run, tokens_of

pytestmark = pytest.mark.slow

TEXTS = ["abcdefgh", "the end of it", "hijk lmnop", "zyxw", "qrst uvwx"]
QUICK = ["--depth", "3", "--ranks", "3", "--rounds", "1", "--max-tokens", "32", "--device", "cpu", "--cpu-threads", "1"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    torch.set_num_threads(1)
    made = tiny_pair(tmp_path_factory.mktemp("pair"), steps=24)
    tiny_medusa(
        load_target(made.target, Loading(progress=False, pack=False)), made.target.parent / "medusa", heads=3, steps=24
    )
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.json"
    path.write_text(json.dumps(TEXTS))
    return path


def search(pair: TinyPair, data: Path, out: Path, *more: str, draft: str | None = None) -> dict:
    head = pair.draft if draft is None else pair.target.parent / draft
    paths = ["--target", str(pair.target), *(["--draft", str(head)] if draft != "" else [])]
    assert main([*paths, "--data", str(data), "--out", str(out), *QUICK, *more]) == 0
    return json.loads((out / "measurements.json").read_text())


@pytest.mark.parametrize(
    ("draft", "option"),
    [("eagle3", "--speculative-token-tree"), ("medusa", "--medusa-choices")],
    ids=["eagle3", "medusa"],
)
@pytest.mark.slow
def test_the_tree_that_is_written_can_be_served_and_the_text_stays(pair, data, tmp_path, capsys, draft, option):
    found = search(pair, data, tmp_path / "tree", "--nodes", "6", draft=draft)
    written = tmp_path / "tree" / "choices.txt"
    shown = capsys.readouterr().out
    assert f"serve it with {option} {written}" in shown
    assert "the tree found" in shown
    choices = read_choices(str(written), option)
    assert [list(choice) for choice in choices] == sorted(found["choices"], key=lambda choice: (len(choice), choice))
    assert found["served_by"] == option
    assert 1 < found["expected_tokens_per_cycle"] == pytest.approx(1 + sum(worths(found)))
    accuracy = found["accuracy"]
    for depth, (hits, tried) in enumerate(zip(accuracy["hits"], accuracy["tried"], strict=True)):
        assert all(hit <= tries for hit, tries in zip(hits, tried, strict=True))
        assert sum(hits) <= (accuracy["cycles"] if depth == 0 else sum(accuracy["hits"][depth - 1]))
    assert accuracy["tried"][0] == [accuracy["cycles"]] * 3
    assert {path.name for path in (tmp_path / "tree").iterdir()} == {
        "choices.txt",
        "measurements.json",
        "tree.png",
        "tree.svg",
    }
    texts = []
    for flags in (
        ["--speculative-algorithm", "NONE"],
        ["--speculative-draft-model-path", str(pair.target.parent / draft), option, str(written)],
    ):
        paths = ["--model-path", str(pair.target), "--max-total-tokens", "512"]
        engine = build_engine(parse_args([*paths, *flags], environ={}), progress=False)
        texts.append(tokens_of(run(engine, [request("a", range(9), ignore_eos=True)])))
    assert texts[0] == texts[1]


def worths(found: dict) -> list[float]:
    out = []
    for choice in found["choices"]:
        worth = 1.0
        for depth, rank in enumerate(choice):
            worth *= found["accuracy"]["used"][depth][rank]
        out.append(worth)
    return out


@pytest.mark.slow
def test_without_nodes_the_fastest_is_chosen(pair, data, tmp_path, capsys):
    found = search(pair, data, tmp_path / "tree")
    last = [cost for cost in found["costs"][-1] if cost["nodes"]]
    assert len(found["choices"]) == max(last, key=lambda cost: cost["tokens_per_second"])["nodes"]
    assert found["costs"][0][0]["nodes"] == 0
    assert "chosen" in capsys.readouterr().out


@pytest.mark.slow
def test_a_drafter_whose_trees_are_its_own_is_measured_and_said_not_to_serve_one(pair, data, tmp_path, capsys):
    found = search(
        pair, data, tmp_path / "tree", "--algorithm", "NGRAM", "--nodes", "4", "--max-tokens", "80", draft=""
    )
    assert found["served_by"] is None
    assert found["check"] == []
    shown = capsys.readouterr().out
    assert "NGRAM makes its trees from each request: it cannot serve choices.txt" in shown
    assert "--speculative-num-draft-tokens 5" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes: '0': should be a number, 1 or more"),
        (["--topk", "4"], "--topk: the tree is what is searched for"),
        (["--speculative-token-tree", "[(0,)]"], "--speculative-token-tree: the tree is what is searched for"),
        (["--port", "1"], "--port: nothing is served here; drop it"),
        (["--data", "no/such"], "No such file or directory: 'no/such'"),
        (["--algorithm", "NONE"], "nothing is drafted here"),
        (["--max-tokens", "2", "--texts", "1"], "too few were made: 20 count"),
        (["--colour"], "unknown flag --colour"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line(arguments, message, tmp_path, capsys):
    try:
        status: object = main(["--out", str(tmp_path), "--cpu-threads", "1", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_prompts_come_from_lists_and_from_pieces_of_text(pair, data, tmp_path):
    tokenizer = load_tokenizer(str(pair.target))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "long.txt").write_text("a" * 600)
    found = prompts_of([data, tmp_path / "more"], tokenizer, 32)
    assert [len(prompt) for prompt in found] == [*map(len, TEXTS), PIECE, PIECE]
    assert [len(prompt) for prompt in prompts_of([data], tokenizer, 2)] == [len(TEXTS[0]), len(TEXTS[2])]
    for name, content, message in (
        ("a.json", b"{", "no JSON"),
        ("b.json", b"[1]", "a JSON list of prompts"),
        ("c.txt", b"\xff\xfe", "no UTF-8 text"),
        ("d.txt", b"", "there is no text in it"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            prompts_of([tmp_path / name], tokenizer, 2)


def test_flags_of_drafting_are_left_out_with_their_values():
    flags = ["--dtype", "float32", "--speculative-draft-model-path", "x/y", "--topk=2", "--device", "cpu"]
    assert without_drafting(flags) == ["--dtype", "float32", "--device", "cpu"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[(0,), (0, 1, 1)]", r"tree.txt: \(0, 1, 1\) has no parent"),
        ("what?", "tree.txt: 'what\\?' is neither a list"),
        (None, "tree.txt: No such file"),
    ],
)
def test_a_file_that_holds_no_tree_is_named(tmp_path, content, message):
    path = tmp_path / "tree.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"--speculative-token-tree .*{message}"):
        read_choices(str(path), "--speculative-token-tree")


def test_the_training_mentions_the_search(capsys):
    with pytest.raises(SystemExit):
        train(["--help"])
    assert "python -m eagle_tools.training.tree_search" in capsys.readouterr().out
