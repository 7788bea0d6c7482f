"""Losses of draft heads: their values by hand, and that they lead to the acceptance that they stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.models.checkpoints.load_target import load_family_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.eagle3 import train_head
from eagle_tools.training.export import export_head
from eagle_tools.training.heads import existing_head, mean_head, new_eagle3
from eagle_tools.training.losses import coupled_acceptance, draft_loss, overlap, spread_draws
from eagle_tools.training.medusa import medusa_loss, new_heads
from eagle_tools.training.recipes import LOSS_NAMES, LossName, Recipe
from eagle_tools.training.tiny import tiny_pair
from eagle_tools.training.ttt import coupling, rollout, teach

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.3, 0.5])
REDUCED = torch.tensor([0.4, 0.3])  # 0.3 of p is outside the draft vocabulary
EVEN = torch.tensor([0.5, 0.5])


def loss(name: LossName, probs: Tensor, draft: Tensor) -> float:
    return float(draft_loss(name, probs, draft.log()))


def test_losses_by_hand() -> None:
    assert loss("tv", P, Q) == pytest.approx(0.3)
    entropy = -(0.5 * math.log(0.2) + 0.3 * math.log(0.3) + 0.2 * math.log(0.5))
    assert loss("kl", P, Q) == pytest.approx(entropy)
    weight = math.exp(-3 * 0.7)
    assert loss("kl+tv", P, Q) == pytest.approx(weight * entropy + (1 - weight) * 0.3)
    surely_1, draft = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.75, 0.25]])
    missed = 1 - 0.25  # odds p / q of token 1 are 4, so the excess of token 0 is 4 * 0.75 - 0
    assert loss("coupled", surely_1, draft) == pytest.approx((missed + missed**2 + missed**3 + missed**4) / 4)


def test_mass_outside_the_draft_vocabulary_is_lost() -> None:
    assert float(overlap(REDUCED, EVEN)) == pytest.approx(0.7)
    assert loss("tv", REDUCED, EVEN) == pytest.approx(0.3)
    perfect = REDUCED / REDUCED.sum()
    assert loss("tv", REDUCED, perfect) == pytest.approx(0.3)  # no draft does better
    inside = coupled_acceptance(REDUCED.expand(2, 2), perfect.expand(2, 2), torch.arange(2)) @ REDUCED
    assert float(inside) == pytest.approx(0.7)
    assert float(coupled_acceptance(REDUCED, perfect, torch.tensor(2))) == 0.0


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_the_gradient_moves_the_draft_towards_the_target(name: LossName) -> None:
    logits = Q.expand(500, 3).log().clone().requires_grad_()
    draft_loss(name, P.expand(500, 3), logits).backward()
    assert logits.grad is not None
    gradient = logits.grad.sum(0)
    assert gradient[0] < 0 < gradient[2]  # descent raises the logit of token 0, which has too little
    logits.grad = None
    outside = torch.tensor([0.6, 0.1]).expand(500, 2)
    draft_loss(name, outside, (start := torch.zeros(500, 2, requires_grad=True))).backward()
    assert start.grad is not None
    assert start.grad.sum(0)[0] < 0 < start.grad.sum(0)[1]


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_gradients_are_finite_where_the_draft_rules_out_the_draw(name: LossName) -> None:
    logits = torch.tensor([[0.0, 200.0, -200.0]], requires_grad=True)  # the last probability is 0 in float32
    draft_loss(name, torch.tensor([[1e-30, 0.0, 1.0]]), logits).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_descent_ends_at_the_target(name: LossName) -> None:
    logits = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 300)
        optimizer.zero_grad()
        draft_loss(name, P.expand(200, 3), logits.expand(200, 3)).backward()
        optimizer.step()
    torch.testing.assert_close(logits.softmax(-1).detach(), P, atol=0.02, rtol=0)


@pytest.mark.parametrize("target", [P, torch.tensor([0.4, 0.1, 0.2])])  # all of p, and a reduced vocabulary
def test_coupled_acceptance_is_that_of_drafts_with_the_noise_of_the_draw(target: Tensor) -> None:
    """Standard error of each rate: below 0.002."""
    whole = torch.cat([target, 1 - target.sum(0, keepdim=True)]).clamp_min(0)  # the last token is not drafted
    gumbel = -torch.empty(400_000, 4).exponential_(generator=torch.Generator().manual_seed(0)).log()
    drawn, drafted = (whole.log() + gumbel).argmax(-1), (Q.log() + gumbel[:, :3]).argmax(-1)
    for token in range(3):
        found = (drafted[drawn == token] == token).float().mean()
        assert float(found) == pytest.approx(float(coupled_acceptance(target, Q, torch.tensor(token))), abs=0.006)
    accepted = float((drafted == drawn).float().mean())
    distance = 1 - float(overlap(target, Q))
    assert accepted >= (1 - distance) / (1 + distance) - 0.006
    assert torch.equal(coupled_acceptance(P.expand(3, 3), P.expand(3, 3), torch.arange(3)), torch.ones(3))


def test_the_best_k_children_miss_the_draw_as_often_as_the_loss_says() -> None:
    """Each of many tokens comes before the draw with a small probability, as the Poisson process needs."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(300, generator=generator).softmax(-1) for _ in range(2))
    accepted = torch.stack([coupled_acceptance(p, q, torch.tensor(y)) for y in range(300)])
    gumbel = -torch.empty(20_000, 300).exponential_(generator=generator).log()
    drawn, ranked = (p.log() + gumbel).argmax(-1), (q.log() + gumbel).topk(4).indices
    for children in (1, 2, 4):
        found = (ranked[:, :children] != drawn[:, None]).all(-1).float().mean()
        assert float(found) == pytest.approx(float(p @ (1 - accepted) ** children), abs=0.02)


def test_spread_draws_follow_the_distribution() -> None:
    drawn = spread_draws(torch.tensor([0.4, 0.1, 0.2]).expand(20, 500, 3))
    assert drawn.shape == (20, 500)
    rates = drawn.flatten().bincount(minlength=4) / 10_000
    torch.testing.assert_close(rates, torch.tensor([0.4, 0.1, 0.2, 0.3]), atol=0.002, rtol=0)


def test_coupling_of_a_head_is_measured_per_pass_against_the_text(tmp_path: Path) -> None:
    target = load_family_target(tiny_pair(tmp_path, steps=0).target, Loading(progress=False, pack=False))
    new = new_eagle3(target, (1, 2, 3), torch.arange(0, 64, 2), 48)
    texts = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        lesson = teach(target, texts, new.draft_ids(), new.head.aux_boundaries, temperature=0.5)
        distances, accepted = coupling(new.head, lesson, 2, new.draft_ids())
        second = (list(rollout(new.head, lesson, 2))[1] / 0.5).softmax(-1)
        p = (target.logits(target(texts[1], torch.arange(12), DenseCausal(1)).hidden)[4] / 0.5).softmax(-1)
    assert not accepted[:, texts[:, 2:] % 2 == 1].any()  # odd ids are not drafted
    assert accepted[:, texts[:, 2:] % 2 == 0].all()
    assert float(distances[1, 1, 3]) == pytest.approx(1 - float(torch.minimum(p[::2], second[1, 3]).sum()), abs=1e-5)


def test_medusa_heads_are_compared_at_the_place_that_they_guess(tmp_path: Path) -> None:
    target = load_family_target(tiny_pair(tmp_path, steps=0).target, Loading(progress=False, pack=False))
    texts = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        lesson = teach(target, texts, torch.arange(64))
        found, _ = medusa_loss(new_heads(target, 1, 1), lesson, "tv")
        guessed = target.logits(lesson.features).softmax(-1)  # a new head guesses the token at t + 1
        distances = 1 - overlap(lesson.probs, guessed)
    assert float(found) == pytest.approx(float(distances.mean()), abs=1e-5)


def test_a_head_to_start_from_must_fit(tmp_path: Path) -> None:
    pair, other = tiny_pair(tmp_path, steps=0), tiny_pair(tmp_path / "other", vocab=48, steps=0)
    target = load_family_target(pair.target, Loading(progress=False, pack=False))
    text = np.arange(400, dtype=np.uint16) % 48
    corpus, recipe = Corpus(text, text, "key"), Recipe(steps=0, length=16, sampled_texts=0)
    with pytest.raises(CheckpointError, match="EAGLE was asked for, but the files hold an EAGLE3 head"):
        train_head(target, corpus, replace(recipe, kind="eagle"), tmp_path / "1", pair.draft)
    with pytest.raises(CheckpointError, match="another target"):
        train_head(target, corpus, recipe, tmp_path / "2", other.draft)
    with pytest.raises(ValueError, match="they cannot be set"):
        train_head(target, corpus, replace(recipe, draft_vocab=16), tmp_path / "3", pair.draft)
    started = train_head(target, corpus, recipe, tmp_path / "4", pair.draft)
    assert torch.equal(started.head.fc.weight, existing_head(target, pair.draft, "eagle3").head.fc.weight)
    another = new_eagle3(target, (1, 2, 3), started.draft_ids(), 128)
    export_head(another, tmp_path / "another", torch.float32)
    with pytest.raises(ValueError, match="another --out"):
        train_head(target, corpus, recipe, tmp_path / "4", tmp_path / "another")


def test_the_mean_of_heads_is_that_of_their_weights(tmp_path: Path) -> None:
    target = load_family_target(tiny_pair(tmp_path, steps=0).target, Loading(progress=False, pack=False))
    heads = [new_eagle3(target, (1, 2, 3), torch.arange(0, 64, 2), 48) for _ in range(3)]
    heads.append(new_eagle3(target, (1, 2, 3), torch.arange(1, 64, 2), 48))  # another vocabulary
    for number, new in enumerate(heads):
        export_head(new, tmp_path / str(number), torch.float32)
    mean = mean_head(target, [tmp_path / "0", tmp_path / "1", tmp_path / "2"], "eagle3")
    for name, parameter in mean.head.named_parameters():
        expected = torch.stack([new.head.get_parameter(name) for new in heads[:3]]).mean(0)
        torch.testing.assert_close(parameter, expected)
    with pytest.raises(ValueError, match="another vocabulary"):
        mean_head(target, [tmp_path / "0", tmp_path / "3"], "eagle3")


def test_a_head_to_start_from_is_the_one_that_was_written(tmp_path: Path) -> None:
    pair = tiny_pair(tmp_path, steps=0)
    target = load_family_target(pair.target, Loading(progress=False, pack=False))
    new = new_eagle3(target, (0, 1, 3), torch.arange(3, 64, 2), 48)
    export_head(new, tmp_path / "head", torch.float32)
    started = existing_head(target, tmp_path / "head", "eagle3")
    assert started.head.aux_boundaries == (0, 1, 3)
    assert torch.equal(started.draft_ids(), new.draft_ids())
    assert all(parameter.requires_grad for parameter in started.head.parameters())
    lesson = teach(target, torch.arange(24).view(2, 12), new.draft_ids(), new.head.aux_boundaries)
    for before, after in zip(rollout(new.head, lesson, 3), rollout(started.head, lesson, 3), strict=True):
        assert torch.equal(before, after)
