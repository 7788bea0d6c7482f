"""`eagle-server train token-map`: what is counted, what is printed, and a file that the server reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_server.models.checkpoints.drafts.draft_vocabulary import load_token_map
from eagle_tools.training.__main__ import main
from eagle_tools.training.rows.token_rows import TokenRow
from eagle_tools.training.tiny import tiny_pair
from eagle_tools.training.token_counts import TokenCounts

VOCAB, END = 64, 63
ROWS = [
    TokenRow("a", 0, (1, 2, 5, 5, 5, 7, 7), (0, 0, 1, 1, 1, 1, 1)),
    TokenRow("b", 0, (9, 9, 9, 9, 5, 8), (0, 0, 0, 0, 1, 1)),
    TokenRow("b", 1, (9, 7, 30), (0, 1, 1)),
]  # 5: four times, 7: three, 8 and 30: once; 9 and 1 are prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("model"), steps=0).target


def write(path: Path, rows: list[TokenRow]) -> Path:
    path.write_text("".join(f"{row.line()}\n" for row in rows))
    return path


def made(model: Path, out: Path, size: int, *sources: str | Path) -> int:
    words = ["token-map", "--model-path", model, *sources, "--size", size, "--out", out]
    return main([str(word) for word in words])


def test_supervised_tokens_are_counted_over_all_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write(tmp_path / "1.jsonl", ROWS[:1]), write(tmp_path / "2.jsonl", ROWS[1:])
    assert made(model, tmp_path / "maps" / "map.pt", 3, "--data", first, second) == 0
    assert load_token_map(tmp_path / "maps" / "map.pt", VOCAB).tolist() == [5, 7, END]
    printed = capsys.readouterr().out
    assert [line.split() for line in printed.splitlines()[:5]] == [
        ["1", "tokens:", "0.00", "%"],  # the special token alone
        ["2", "tokens:", "44.44", "%"],
        ["3", "tokens:", "77.78", "%"],
        ["4", "tokens:", "88.89", "%"],
        ["8", "tokens:", "100.00", "%"],
    ]
    assert "99.5 % takes 5 tokens; 9 tokens were counted, 4 different ones" in printed
    assert f"3 of {VOCAB} tokens" in printed


def test_texts_are_counted_whole(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc")
    assert made(model, tmp_path / "map.pt", 4, "--text", text) == 0
    with_rows = write(tmp_path / "rows.jsonl", ROWS)
    assert made(model, tmp_path / "both.pt", 2, "--text", text, "--data", with_rows) == 0
    assert load_token_map(tmp_path / "both.pt", VOCAB).tolist() == [5, END]


def test_more_tokens_than_occur_are_filled_with_the_lowest_ids() -> None:
    counts = TokenCounts.of([torch.tensor([9, 9, 40]).numpy()], VOCAB, {END, VOCAB + 1})
    assert counts.special == {END}
    assert counts.draft_ids(6).tolist() == [0, 1, 2, 9, 40, END]
    assert counts.draft_ids(VOCAB).tolist() == list(range(VOCAB))


@pytest.mark.parametrize(
    ("row", "size", "message"),
    [
        ('{"input_ids": [1, 2], "loss_mask": [0, 0]}', 3, "no token to count"),
        ("", 3, "no token to count"),
        ('{"input_ids": [1, 64], "loss_mask": [0, 1]}', 3, "row 1: token id 64 is outside the vocabulary"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', 3, "row 1: loss_mask should be"),
        ('{"id": 1, "input_ids": [1], "loss_mask": [1]}\n{"id": 2}', 3, "row 2: it has no input_ids"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 1]}', 0, "1 special tokens alone"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 1]}', 65, "all 64 tokens"),
    ],
)
def test_data_that_says_nothing_is_refused(
    row: str, size: int, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(row)
    assert made(model, tmp_path / "map.pt", size, "--data", tmp_path / "rows.jsonl") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "map.pt").exists()
