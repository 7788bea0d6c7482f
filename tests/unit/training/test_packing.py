"""Trainings on token rows: documents of a window do not see each other, and only masked tokens count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.block import BlockHead
from eagle_tools.training.__main__ import main
from eagle_tools.training.block import new_block
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.heads import new_eagle, new_eagle3
from eagle_tools.training.losses import draft_loss
from eagle_tools.training.medusa import medusa_loss, new_heads
from eagle_tools.training.packed_blocks import block_loss, block_scores, drawn_anchors
from eagle_tools.training.packing import Packing, chain_rates
from eagle_tools.training.recipes import LOSS_NAMES, BlockRecipe, Recipe
from eagle_tools.training.redrafter import new_redrafter, rollout_loss
from eagle_tools.training.rows.row_set import CutRow, RowSet, packed, read_row_set
from eagle_tools.training.rows.token_rows import TokenRow
from eagle_tools.training.sources import begin
from eagle_tools.training.tiny import tiny_pair
from eagle_tools.training.ttt import by_start, rollout, teach, ttt_loss
from tests.unit.training.test_training import VOCAB, random_target

STEPS, LENGTH = 3, 29
IDS = torch.arange(0, VOCAB, 2)  # a draft vocabulary


def rows() -> list[CutRow]:
    """Answers of 1 to 9 tokens after prompts."""
    draw = np.random.default_rng(5)
    made = []
    for prompt, answer in ((4, 9), (2, 3), (7, 4), (1, 6), (3, 1)):
        made.append(CutRow(draw.integers(0, VOCAB, prompt + answer), np.arange(prompt + answer) >= prompt))
    return made


def together() -> tuple[Tensor, Packing]:
    a, b, c, d, e = rows()
    return packed([[a, b, c], [d, e]], LENGTH)


def apart() -> tuple[Tensor, Packing]:
    return packed([[row] for row in rows()], LENGTH)


def test_a_step_counts_if_all_that_its_chain_reads_and_predicts_was_generated() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
    supervised = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    chains = Packing(documents, supervised).chains(3)
    assert chains.int().tolist() == [[[0, 1, 1, 0, 0, 1, 0]], [[0, 1, 0, 0, 0, 0, 0]], [[0, 0, 0, 0, 0, 0, 0]]]
    assert Packing(documents, supervised).positions().tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_loss_of_packed_rows_is_that_of_rows_apart(kind: str, loss: str) -> None:
    torch.manual_seed(0)
    target = random_target()
    new = new_eagle3(target, (1, 2, 3), IDS, 48) if kind == "eagle3" else new_eagle(target, 48)
    found = []
    for window, packing in (together(), apart()):
        lesson = teach(target, window, new.draft_ids(), new.head.aux_boundaries, packing=packing)
        value, hits = ttt_loss(new.head, lesson, STEPS, loss)  # type: ignore[arg-type]
        found.append((value, chain_rates(by_start(hits), packing.chains(STEPS))))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert found[0][1] == found[1][1]


def test_the_loss_of_a_row_is_over_the_rows_that_count() -> None:
    """Against a text alone, without a packing, and an average by hand."""
    torch.manual_seed(0)
    target = random_target()
    new = new_eagle3(target, (1, 2, 3), IDS, 48)
    ids, mask, *_ = rows()[0]  # 4 of the prompt, 9 of the answer
    window, packing = packed([[CutRow(ids, mask)]], len(ids) - 1)
    plain = teach(target, window, IDS, new.head.aux_boundaries)
    logits = list(rollout(new.head, plain, STEPS))
    probs = plain.probs[None]
    by_hand = sum(0.8**s * draft_loss("kl", probs[:, 3 + s :], logits[s][:, 3 + s :]) for s in range(STEPS)) / sum(
        0.8**s for s in range(STEPS)
    )
    lesson = teach(target, window, IDS, new.head.aux_boundaries, packing=packing)
    torch.testing.assert_close(ttt_loss(new.head, lesson, STEPS)[0], by_hand, rtol=1e-5, atol=1e-5)


def test_medusa_and_redrafter_losses_are_those_of_rows_apart() -> None:
    torch.manual_seed(0)
    target = random_target()
    medusa, redrafter = new_heads(target, STEPS, 1), new_redrafter(target, exit_dim=16)
    medusas, rollouts = [], []
    for window, packing in (together(), apart()):
        lesson = teach(target, window, torch.arange(VOCAB), packing=packing)
        medusas.append(medusa_loss(medusa, lesson)[0])
        rollouts.append(rollout_loss(redrafter.head, lesson, STEPS)[0])
    torch.testing.assert_close(*medusas, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*rollouts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_of_a_block_is_that_of_its_row_apart(causal: bool) -> None:
    torch.manual_seed(0)
    target = random_target()
    recipe = BlockRecipe(boundaries=(1, 2), block_size=4, rank=8, intermediate_size=48, causal=causal)
    head = new_block(target, recipe, VOCAB - 1).head
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    everything = torch.arange(VOCAB)

    def loss(window: Tensor, packing: Packing, anchors: Sequence[Sequence[int]]) -> Tensor:
        lesson = teach(target, window, everything, head.aux_boundaries, packing=packing)
        return block_loss(block_scores(head, lesson, torch.tensor(anchors)), "kl", "decay", 4.0)

    (tokens, both), (window, packing), first = together(), apart(), len(rows()[0][0])
    first_window = tokens[:1], Packing(both.documents[:1], both.supervised[:1])
    for number, anchor, shift in ((0, 4, 0), (1, 1, first)):
        alone = window[number, None], Packing(packing.documents[number, None], packing.supervised[number, None])
        torch.testing.assert_close(loss(*first_window, [[anchor + shift]]), loss(*alone, [[anchor]]))


def test_anchors_are_drawn_where_the_target_wrote() -> None:
    torch.manual_seed(0)
    target, (window, packing) = random_target(), together()
    lesson = teach(target, window, torch.arange(VOCAB), packing=packing)
    counted = packing.chains(1)[0]
    for seed in range(4):
        anchors = drawn_anchors(lesson, 0, 3, 4, seed)
        assert counted.gather(1, anchors).all()


def write(path: Path, made: Sequence[TokenRow]) -> Path:
    path.write_text("".join(row.line() + "\n" for row in made))
    return path


def many_rows(count: int, vocab: int = 62) -> list[TokenRow]:
    """Answers that count up from a random prompt, two of each conversation."""
    draw, made = np.random.default_rng(0), []
    for index in range(count):
        ids = [*draw.integers(0, vocab, draw.integers(2, 12)), *((index + n) % 20 for n in range(draw.integers(2, 20)))]
        answer = int(draw.integers(2, len(ids)))
        mask = [0] * (len(ids) - answer) + [1] * answer
        made.append(TokenRow(f"c{index // 2}", index % 2, tuple(map(int, ids)), tuple(mask), "stop"))
    return made


def row_set(tmp_path: Path, made: Sequence[TokenRow], length: int = 31) -> RowSet:
    return read_row_set([write(tmp_path / "rows.jsonl", made)], 64, (63, 100), length)


def test_every_row_is_seen_once_before_any_is_seen_again(tmp_path: Path) -> None:
    made = many_rows(300)
    rows = row_set(tmp_path, made)
    in_train = {tuple(ids.tolist()) for window in rows.train for ids, *_ in window}
    in_held_out = {tuple(ids.tolist()) for window in rows.held_out for ids, *_ in window}
    assert len(in_train) + len(in_held_out) == 300 and in_held_out
    for row in made:  # a conversation is in one part
        both = {other.input_ids in in_held_out for other in made if other.id == row.id}
        assert len(both) == 1
    assert sum(len(window) for window in rows.train) > 1.5 * len(rows.train)  # packed
    seen: list[int] = []
    for step in range(len(rows.train)):
        tokens, packing = rows.window(step, 1)
        assert tokens.shape == (1, 32)
        seen.append(int(packing.supervised.sum()))
    assert sum(seen) == rows.counts.total
    again = rows.window(0, len(rows.train))[0]
    assert torch.equal(again, rows.window(0, len(rows.train))[0])
    assert not torch.equal(again, rows.window(1, len(rows.train))[0])


def test_the_draft_vocabulary_is_of_answers_and_has_every_special_id(tmp_path: Path) -> None:
    rows = row_set(tmp_path, many_rows(300)).counts
    ids = rows.draft_ids(12)
    assert 63 in ids and 100 not in ids and len(ids) == 12 and torch.equal(ids, ids.sort().values)
    assert rows.occurrences[ids[:-1].numpy()].min() >= np.delete(rows.occurrences, ids.numpy()).max()
    assert 0.4 < rows.coverage(ids) < 1 == rows.coverage(torch.arange(64))
    for share in (0.0, 0.5, 0.9, 1.0):
        size = rows.size_for(share)
        assert rows.coverage(rows.draft_ids(size)) >= share
        assert size == 1 or rows.coverage(rows.draft_ids(size - 1)) < share
    with pytest.raises(ValueError, match="special tokens alone"):
        rows.draft_ids(0)


def test_rows_that_are_cut_or_teach_nothing_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lone = TokenRow("lone", 0, (1, 2, 3), (0, 1, 0))
    late = TokenRow("late", 0, (*range(40), 1, 2), (0,) * 40 + (1, 1))
    row_set(tmp_path, [*many_rows(20), lone, late])
    assert "20 rows" in (out := capsys.readouterr().out)
    assert "1 cut at 32 tokens, 2 left out" in out
    with pytest.raises(ValueError, match="too few rows: 0"):
        row_set(tmp_path, [lone, late])


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["eagle3", "medusa", "redrafter", "block"])
def test_the_command_line_trains_every_head_on_rows(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = tiny_pair(tmp_path, steps=0)
    data = write(tmp_path / "rows.jsonl", many_rows(200))
    command = [stage, "--target", str(pair.target), "--data", str(data), "--out", str(tmp_path / "head")]
    layers = {"eagle3": ["--aux-layers", "0", "2", "3", "--draft-vocab", "40"], "block": ["--aux-layers", "1", "2"]}
    sizes = ["--steps", "40", "--length", "63", "--device", "cpu", *layers.get(stage, [])]
    assert main([*command, *sizes]) == 0
    out = capsys.readouterr().out
    assert "answers accept length: " in out and "tokens to train on" in out
    assert ("40 of 64 tokens" in out) == (stage == "eagle3")
    history = json.loads((tmp_path / "head" / "training" / f"{stage}-history.json").read_text())
    assert history["train loss"][-1][1] < history["train loss"][0][1]
    algorithm = {"medusa": "MEDUSA", "redrafter": "REDRAFTER"}.get(stage)
    target = load_target(pair.target, Loading(progress=False))
    head = load_draft(tmp_path / "head", target, Loading(context=64, progress=False), algorithm=algorithm)  # type: ignore[arg-type]
    assert isinstance(head, BlockHead) == (stage == "block")
    before = {file.name: load_file(file) for file in (tmp_path / "head").glob("*.safetensors")}
    assert main([*command, *sizes]) == 0  # all steps are done: the same head
    for name, tensors in before.items():
        again = load_file(tmp_path / "head" / name)
        assert all(torch.equal(tensor, again[key]) for key, tensor in tensors.items())
    curves = json.loads((tmp_path / "head" / "curves.json").read_text())
    lengths = dict(curves["answers accept length"])
    card = (tmp_path / "head" / "README.md").read_text()
    assert f"The weights of step {max(lengths, key=lengths.__getitem__)} were kept" in card and "curves.png" in card
    assert (tmp_path / "head" / "curves.png").stat().st_size > 1000
    further = [
        *command[:-1],
        str(tmp_path / "further"),
        *sizes[:6],
        "--init",
        str(tmp_path / "head"),
        "--accumulate",
        "2",
    ]
    refused = {"eagle3": ["--ffn", "8"], "block": ["--layers", "1"], "medusa": ["--heads", "2"]}
    assert main([*further, *refused.get(stage, ["--draft-layers", "1"])]) == 2
    assert "they cannot be set" in capsys.readouterr().err
    assert main([*further, "--peak", "1e-5"]) == 0
    started = json.loads((tmp_path / "further" / "curves.json").read_text())
    assert started["train loss"][0][1] < history["train loss"][0][1]
    text = tmp_path / "plain.txt"
    text.write_text("x")
    assert main([*command[:4], str(data), str(text), *command[5:]]) == 2
    assert "give one kind" in capsys.readouterr().err


def test_a_windowed_target_is_trained_on_rows_and_not_on_text(tmp_path: Path) -> None:
    target = random_target()
    target.config = replace(target.config, windows=(8, 0, 0, 0))
    begin(target, row_set(tmp_path, many_rows(20)), Recipe(), tmp_path / "out")
    text = np.zeros(400, dtype=np.uint16)
    with pytest.raises(ValueError, match="are trained on token rows"):
        begin(target, Corpus(text, text, "key"), Recipe(), tmp_path / "other")
