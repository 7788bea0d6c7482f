"""Trainings refuse files of chats, and take text that merely has JSON in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_tools.training.__main__ import main as train
from eagle_tools.training.corpus import text_files
from eagle_tools.training.tree_search.__main__ import main as search

OPENAI = {"id": 1, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
PLAIN = {"text": "no chat"}
CHATS = {
    "lines.jsonl": f"{json.dumps(OPENAI)}\n{json.dumps(OPENAI)}\n",
    "one.jsonl": json.dumps(SHAREGPT),
    "lines.json": f"{json.dumps(SHAREGPT)}\n\n{json.dumps(SHAREGPT)}",
    "lines.txt": f"\n{json.dumps(OPENAI)}\r\n",
    "later.jsonl": f"{json.dumps(PLAIN)}\n{json.dumps(OPENAI)}\n",
    "marked.jsonl": f"\ufeff{json.dumps(OPENAI)}\n",
    "list.json": json.dumps([SHAREGPT, SHAREGPT], indent=2),
    "later.json": json.dumps([PLAIN, OPENAI]),
}
TEXTS = {
    "package.json": json.dumps({"name": "x", "messages": [{"role": "x"}]}, indent=2),
    "request.json": json.dumps(OPENAI),
    "words.json": json.dumps(["messages", "conversations"]),
    "rows.txt": f"{json.dumps(PLAIN)}\n" * 2,
    "log.jsonl": json.dumps({"messages": ["started", "ended"]}),
    "readme.md": f"A row is\n{json.dumps(OPENAI)}\n",
    "code.py": "[x for x in y]\n" + json.dumps(OPENAI),
    "broken.jsonl": '{"messages": [\n' * 3,
    "deep.json": "[" * 100_000 + '"messages"',
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("stage", ["eagle3", "medusa", "redrafter", "block"])
def test_every_training_refuses_chats_in_one_line(
    name: str, stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the target is loaded, also in a directory."""
    file, out = tmp_path / "data" / name, tmp_path / "head"
    file.parent.mkdir()
    file.write_text(CHATS[name], encoding="utf-8")
    assert train([stage, "--target", str(tmp_path / "none"), "--data", str(file.parent), "--out", str(out)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ValueError: --data {file}: its rows are chats") and "train prepare" in line
    assert not out.exists()


@pytest.mark.parametrize("name", ["lines.jsonl", "list.json"])
def test_the_search_for_a_tree_refuses_chats(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    file.write_text(CHATS[name], encoding="utf-8")
    assert search(["--data", str(file), "--out", str(tmp_path / "tree")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"eagle_server: error: --data {file}: its rows are chats")


def test_text_with_json_in_it_is_text(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert text_files([tmp_path]) == sorted(tmp_path / name for name in TEXTS)


@pytest.mark.parametrize("row", [PLAIN, {"id": 1, "prompt": "a"}, {"prompt": "a", "completion": "b"}])
def test_lines_of_json_with_texts_are_no_plain_text(row: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"\ufeff\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"rows.jsonl: its rows are JSON with texts in it.*train prepare.*--preformatted"
    ):
        text_files([tmp_path])
