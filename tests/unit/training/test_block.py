"""Training of block drafters: the packed pass is the served computation, and what is saved drafts the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.block import BlockHead
from eagle_server.models.drafts.block_edges import CANDIDATES
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.__main__ import main
from eagle_tools.training.block import NewBlock, new_block, rarest_token
from eagle_tools.training.export import export_head
from eagle_tools.training.loop import History, Optimizers, read_history
from eagle_tools.training.losses import overlap
from eagle_tools.training.model_card import HeadFacts, heads_card
from eagle_tools.training.packed_blocks import (
    BlockScores,
    block_loss,
    block_rows,
    block_scores,
    drawn_anchors,
    row_weights,
)
from eagle_tools.training.recipes import BlockRecipe, EdgeName
from eagle_tools.training.tiny import tiny_pair
from eagle_tools.training.ttt import Lesson, teach
from tests.support.engines import CONTEXT, MARGIN, random_target, request, run, speculative

V, MASK = 48, 47
RECIPE = BlockRecipe(block_size=4, rank=6, boundaries=(1, 4))


def random_head(target: TargetModel, recipe: BlockRecipe) -> NewBlock:
    new = new_block(target, recipe, MASK)
    for parameter in new.head.parameters():
        spread = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=spread)
    return new


def lesson_of(target: TargetModel, tokens: list[int]) -> Lesson:
    """The lesson whose last row is that of the last token but one."""
    return teach(target, torch.tensor([[*tokens, 0]]), torch.arange(V), RECIPE.boundaries)


@pytest.mark.parametrize("edges", ["none", "selector", "markov"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("next_token", [False, True])
def test_packed_blocks_equal_the_served_rows_and_drafts(
    tmp_path: Path, edges: EdgeName, *, causal: bool, next_token: bool
) -> None:
    torch.manual_seed(0)
    target = random_target(V, 32, 6)
    new = random_head(target, replace(RECIPE, edges=edges, causal=causal, next_token=next_token))
    export_head(new, tmp_path, torch.float32)
    head: Any = load_draft(tmp_path, target, Loading(context=CONTEXT, lookahead=MARGIN, progress=False))
    assert replace(head.block, layers=new.head.config) == new.head.block
    engine = speculative(target, head, head.max_steps, 1, chunked_prefill_size=7, page_size=2)
    texts, seen = list[list[int]](), list[int]()
    drafter: Any = engine.worker.drafter
    rows, propose = head.rows, drafter.propose

    def compared_rows(roots: Tensor, positions: Tensor, attention: Any) -> Tensor:
        served = rows(roots, positions, attention)
        for y, text in zip(served, texts, strict=True):
            packed = block_rows(new.head, lesson_of(target, text), torch.tensor([[len(text) - 2]]))
            if len(y) == len(packed[0]):  # fewer rows are served where fewer tokens may still be kept
                torch.testing.assert_close(y, packed[0], rtol=1e-5, atol=1e-4)
        return served

    def compared(draft: Any, batch: Any) -> Any:
        texts[:] = [list(decode.all_tokens)[: decode.seq_len + 1] for decode in batch.decodes]
        tree = propose(draft, batch)
        for text, drafted in zip(texts, tree.tokens[:, 1:].tolist(), strict=True):
            if len(drafted) < head.max_steps:
                continue
            lesson = lesson_of(target, [*text, *drafted])
            scores = block_scores(new.head, lesson, torch.tensor([[len(text) - 2]]))
            kept = scores.base[0].topk(CANDIDATES if edges == "selector" else V).indices
            places = scores.logits[0].gather(1, kept).argmax(1, keepdim=True)
            assert kept.gather(1, places)[:, 0].tolist() == drafted
            seen.append(len(text))
        return tree

    head.rows, drafter.propose = compared_rows, compared
    with torch.no_grad():
        run(engine, [request(i, range(1 + i, 9 * i + 3), max_tokens=9, ignore_eos=True) for i in range(3)])
    assert len(set(seen)) > 10


def test_blocks_of_one_text_do_not_see_each_other_or_what_follows() -> None:
    torch.manual_seed(0)
    target, draw = random_target(V, 32, 6), torch.Generator().manual_seed(1)
    new = random_head(target, replace(RECIPE, causal=False))
    texts = torch.randint(V, (2, 20), generator=draw)
    anchors = torch.tensor([[0, 3, 9], [4, 5, 14]])
    with torch.no_grad():
        together = block_rows(new.head, teach(target, texts, torch.arange(V), RECIPE.boundaries), anchors).unflatten(
            0, (2, 3)
        )
        for text, places in enumerate(anchors.tolist()):
            for block, anchor in enumerate(places):
                alone = lesson_of(target, texts[text, : anchor + 2].tolist())
                y = block_rows(new.head, alone, torch.tensor([[anchor]]))[0]
                torch.testing.assert_close(together[text, block], y, rtol=0, atol=1e-5)


def test_anchors_differ_and_their_blocks_end_inside_the_text() -> None:
    lesson = lesson_of(random_target(V, 32, 6), list(range(20)))  # 19 rows
    anchors = drawn_anchors(lesson, 5, 100, 4, seed=3)
    assert anchors.tolist() == [list(range(5, 16))]
    some = drawn_anchors(lesson, 5, 6, 4, seed=3)
    assert len(set(some[0].tolist())) == 6
    assert torch.equal(some, drawn_anchors(lesson, 5, 6, 4, seed=3))
    assert not torch.equal(some, drawn_anchors(lesson, 5, 6, 4, seed=4))
    with pytest.raises(ValueError, match="too short for blocks of 4 from row 16"):
        drawn_anchors(lesson, 16, 6, 4, seed=3)


def test_drafts_are_compared_with_the_distribution_after_the_token_before_them() -> None:
    torch.manual_seed(0)
    target = random_target(V, 32, 6)
    text = torch.randint(V, (1, 20))
    for next_token in (False, True):
        new = random_head(target, replace(RECIPE, next_token=next_token))
        lesson = teach(target, text, torch.arange(V), RECIPE.boundaries)
        with torch.no_grad():
            scores = block_scores(new.head, lesson, torch.tensor([[6]]))
        drafts = 4 if next_token else 3
        assert scores.following.tolist() == [text[0, 8 : 8 + drafts].tolist()]  # the root is at 7
        expected = lesson.probs[6 : 6 + drafts].index_fill(1, torch.tensor([MASK]), 0.0)
        torch.testing.assert_close(scores.probs[0], expected)


def scores_by_hand() -> BlockScores:
    """One block of two drafts over three tokens."""
    q = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]])
    p = torch.tensor([[[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]])
    return BlockScores(q.log(), q.log(), torch.zeros(1, 2), None, None, p, torch.tensor([[1, 2]]))


def test_loss_by_hand() -> None:
    scores = scores_by_hand()
    weights = torch.tensor([1.0, 1 / torch.e])
    kl = -(scores.probs * scores.logits).sum(-1)[0]
    tv = torch.tensor([0.25, 0.1])
    confidence = torch.tensor(2.0).log()  # of sigmoid(0), whatever is right
    expected = ((0.1 * kl + 0.9 * 2 * tv) * weights).sum() / weights.sum() + confidence
    torch.testing.assert_close(block_loss(scores, "dspark", "decay", 1.0), expected)
    first, second = 0.5 * 0.25 + 0.5, 0.5 * 0.8 + 0.5
    torch.testing.assert_close(
        row_weights(scores, "dpace", 1.0), torch.tensor([[first + first * second, first * second]])
    )


def test_confidence_does_not_train_the_draft_through_its_label() -> None:
    scores = scores_by_hand()
    logits = scores.logits.clone().requires_grad_()
    sureness = torch.zeros(1, 2, requires_grad=True)
    scores = replace(scores, base=logits, logits=logits, sureness=sureness)
    with_confidence = torch.autograd.grad(block_loss(scores, "tv", "decay", 4.0), logits)[0]
    without = torch.autograd.grad(block_loss(replace(scores, sureness=None), "tv", "decay", 4.0), logits)[0]
    torch.testing.assert_close(with_confidence, without)
    pushed = torch.autograd.grad(block_loss(scores, "tv", "decay", 4.0), sureness)[0]
    assert (pushed < 0).all()  # 1 - TV is 0.75 and 0.9, and it says 0.5


@pytest.mark.training
@pytest.mark.parametrize("edges", ["none", "selector", "markov"])
def test_a_few_steps_lower_the_loss(tmp_path: Path, edges: EdgeName) -> None:
    torch.manual_seed(0)
    target = random_target(V, 32, 6)
    recipe = replace(RECIPE, edges=edges, weighting="dpace")
    new = new_block(target, recipe, MASK)
    optimizers = Optimizers.of(new.head)
    texts = torch.randint(V, (8, 24), generator=torch.Generator().manual_seed(1))
    lesson = teach(target, texts, torch.arange(V), RECIPE.boundaries)
    losses, sure = list[float](), list[float]()
    for step in range(60):
        scores = block_scores(new.head, lesson, drawn_anchors(lesson, 0, 8, recipe.block_size, step))
        loss = block_loss(scores, recipe.loss, recipe.weighting, recipe.gamma)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizers.step(0.01)
        assert scores.sureness is not None
        accepted = overlap(scores.probs, scores.logits.softmax(-1))
        sure.append(float((scores.sureness.sigmoid() - accepted).detach().abs().mean()))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert sure[-1] < 0.2
    export_head(new, tmp_path, torch.float32)
    loaded: Any = load_draft(tmp_path, target, Loading(context=CONTEXT, progress=False, pack=False))
    anchors = drawn_anchors(lesson, 0, 8, recipe.block_size, 0)
    with torch.no_grad():
        torch.testing.assert_close(block_rows(loaded, lesson, anchors), block_rows(new.head, lesson, anchors))


def test_the_rarest_token_with_the_largest_embedding_is_the_mask() -> None:
    target = random_target(V, 32, 6)
    stream = torch.arange(V).repeat(2)[:-3].numpy()
    rare = int(target.embed.detach()[-3:].norm(dim=1).argmax()) + V - 3
    assert rarest_token(target, np.bincount(stream)) == rare


def test_the_card_has_every_draft_of_the_block() -> None:
    lengths = {
        "held-out loss": 2.0,
        "T=0 accept length": 3.0,
        "T=1 accept length": 2.0,
        "T=1 coupled accept length": 2.5,
    }
    steps = {f"{label} step {k}": 0.5 + k / 10 for label in ("T=0", "T=1", "T=1 coupled", "T=1 TV") for k in (1, 2)}
    numbers = {**lengths, **steps, "T=1 confidence error": 0.125}
    facts = HeadFacts(History({name: [(7, value)] for name, value in numbers.items()}), 3_800_000)
    card = heads_card({"medusa": facts, "block": facts})
    assert "| [`block/`](block-loss.png) | 3.8 | 7 | 2.000 | 3.00 | 2.00 |" in card
    assert "| T=1 coupled | 0.600 | 0.700 | 2.50 |" in card
    assert "At T=1 TV(p, q) is 0.600, 0.700 in these steps" in card
    assert "wrong by 0.125 on average" in card


@pytest.mark.training
@pytest.mark.slow
def test_the_command_line_trains_a_block_drafter_in_two_sittings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, out = tiny_pair(tmp_path, steps=1, context=64), tmp_path / "head"
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    command = ["block", "--target", str(pair.target), "--data", str(tmp_path / "text.txt"), "--out", str(out)]
    sizes = ["--length", "32", "--sampled-texts", "8", "--anchors", "4", "--block-size", "4", "--rank", "8"]
    settings = [*sizes, "--layers", "1", "--aux-layers", "1", "2", "--device", "cpu"]
    assert main([*command, *settings, "--steps", "1"]) == 2
    assert "never got a gradient" in capsys.readouterr().err  # the edges begin with a matrix of zeros
    assert main([*command, *settings, "--steps", "3"]) == 0
    assert "block-loss.png" in capsys.readouterr().out
    curves = read_history(out / "training" / "block-history.json").curves
    assert [step for step, _ in curves["held-out loss"]] == [1, 3]
    assert {"T=0 step 4", "T=1 coupled accept length", "T=1 confidence error"} <= set(curves)
    written = json.loads((out / "config.json").read_text())
    assert (written["markov_rank"], written["target_layer_ids"], written["is_causal"]) == (8, [0, 1], True)
    target = load_target(pair.target, Loading(progress=False), dtype="float32")
    head = load_draft(out, target, Loading(context=64, progress=False))
    assert isinstance(head, BlockHead)
    assert head.aux_boundaries == (1, 2)
    assert main([*command, *settings, "--steps", "3", "--weights", "dpace"]) == 2
    assert "another --out" in capsys.readouterr().err
