"""ReDrafter: checkpoints compute the formula, beam search equals the textbook's, training equals serving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.models.drafts.redrafter import RedrafterHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.batch.draft_ranking import BY_PROBABILITY
from eagle_server.worker.drafters.interface import DrafterSetup
from eagle_server.worker.drafters.redrafter import Beams, beam_search
from eagle_tools.training.redrafter import accept_length, new_redrafter, rollout, rollout_loss
from eagle_tools.training.ttt import teach
from tests.support.redrafter import random_redrafter, reference_logits
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models.draft_checkpoints import CONTEXT, H, Tensors, V

CONFIG: dict[str, Any] = {
    "model_type": "recurrent_drafting_drafter",
    "vocab_size": V,
    "hidden_size": H,
    "exit_dim": 2 * H,
    "num_draft_layers": 2,
    "rnn": True,
    "num_lookback_tokens": 4,
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    torch.set_num_threads(1)
    return dc.target()


def tensors(*, exit_dim: int = 2 * H, layers: int = 2, rnn: bool = True) -> Tensors:
    torch.manual_seed(4)
    shapes: dict[str, tuple[int, ...]] = {}
    if rnn:
        shapes |= {"rnn_u.weight": (H, H), "rnn_u.bias": (H,), "rnn_w.weight": (H, H)}
    if exit_dim != 2 * H:
        shapes |= {"input_proj.weight": (exit_dim, 2 * H), "input_proj.bias": (exit_dim,)}
    for i in range(layers):
        shapes |= {f"lm_head.{i}.linear.weight": (exit_dim, exit_dim), f"lm_head.{i}.linear.bias": (exit_dim,)}
    shapes[f"lm_head.{layers}.weight"] = (V, exit_dim)
    return {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def load(path: Path, target: TargetModel, **options: Any) -> DraftModel:
    return load_draft(path, target, Loading(context=CONTEXT, progress=False), **options)


def served_logits(head: RedrafterHead, contexts: Tensor, tokens: Tensor) -> list[Tensor]:
    """The logits after each of tokens [rows, n]."""
    state, out = None, []
    for k in range(tokens.shape[1]):
        state = head.state(tokens[:, k], state)
        out.append(head.logits(contexts, state))
    return out


VARIANTS: dict[str, dict[str, Any]] = {
    "rnn": {},
    "sum of embeddings": {"rnn": False},
    "projected": {"exit_dim": 24},
    "one block": {"layers": 1},
    "no block": {"layers": 0},
}


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_computes_its_formula(tmp_path: Path, target: TargetModel, name: str, silent: bool) -> None:
    made = VARIANTS[name]
    w = tensors(**made)
    config = {"model_type": CONFIG["model_type"]}
    if not silent:
        declared = {"exit_dim": made.get("exit_dim", 2 * H), "num_draft_layers": made.get("layers", 2)}
        config = {**CONFIG, **declared, "rnn": made.get("rnn", True)}
    loaded = load(dc.write(tmp_path, w, config), target, algorithm="REDRAFTER")
    head = loaded
    assert loaded.algorithm == "REDRAFTER"
    assert isinstance(head, RedrafterHead)
    assert (head.aux_boundaries, head.draft_vocab_size) == ((), V)
    tokens, contexts = torch.randint(V, (5, 4)), torch.randn(5, H)
    for k, logits in enumerate(served_logits(head, contexts, tokens)):
        assert logits.dtype == torch.float32
        for row in range(5):
            expected = reference_logits(w, target.embed, contexts[row], tokens[row, : k + 1].tolist())
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-5)


def test_a_head_is_recognized_by_its_tensors(tmp_path: Path, target: TargetModel) -> None:
    assert load(dc.write(tmp_path / "a", tensors(), {}), target).algorithm == "REDRAFTER"
    plain = dc.write(tmp_path / "b", tensors(rnn=False), {"exit_dim": 2 * H})
    assert load(plain, target).algorithm == "REDRAFTER"


def test_an_exported_head_loads_again_with_equal_logits(tmp_path: Path, target: TargetModel) -> None:
    new = new_redrafter(target, exit_dim=40, draft_layers=1)
    save_checkpoint(new.head, tmp_path, new.config_json, torch.float32)
    head = load(tmp_path, target)
    assert isinstance(head, RedrafterHead)
    contexts, tokens = torch.randn(3, H), torch.randint(V, (3, 3))
    for mine, theirs in zip(
        served_logits(head, contexts, tokens), served_logits(new.head, contexts, tokens), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_the_head_shares_the_embedding_and_follows_the_targets_dtype(tmp_path: Path) -> None:
    target = dc.target().to(torch.bfloat16)
    head = load(dc.write(tmp_path, {k: t.half() for k, t in tensors().items()}, CONFIG), target)
    assert isinstance(head, RedrafterHead)
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert not any(p.shape == target.embed.shape for p in head.parameters())


Edit = Callable[[Tensors, dict[str, Any]], object]
ERRORS: dict[str, tuple[Edit, str]] = {
    "missing": (lambda t, c: t.pop("rnn_w.weight"), "missing tensors: rnn_w.weight"),
    "missing bias": (lambda t, c: t.pop("lm_head.1.linear.bias"), "missing tensors: lm_head.1.linear.bias"),
    "unexpected": (lambda t, c: t.update(extra=torch.ones(1)), "unexpected tensors: extra"),
    "bias that is not in the format": (
        lambda t, c: t.update({"rnn_w.bias": torch.ones(H)}),
        "unexpected tensors: rnn_w.bias",
    ),
    "no vocabulary rows": (lambda t, c: t.pop("lm_head.2.weight"), "missing tensors: lm_head.2.weight"),
    "projection that is not needed": (
        lambda t, c: t.update({"input_proj.weight": torch.ones(2 * H, 2 * H)}),
        "unexpected tensors: input_proj.weight",
    ),
    "another target's vocabulary": (lambda t, c: c.update(vocab_size=50), "vocab_size: the target's is 48, found 50"),
    "another target's width": (lambda t, c: c.update(hidden_size=64), "hidden_size: the target's is 32, found 64"),
    "rows of the vocabulary": (
        lambda t, c: t.update({"lm_head.2.weight": torch.ones(50, 2 * H)}),
        r"lm_head.2.weight: expected shape \[48, 64\], found \[50, 64\]",
    ),
    "exit_dim": (lambda t, c: c.update(exit_dim=32), "exit_dim: config.json says 32, but the tensors say 64"),
    "layers": (lambda t, c: c.update(num_draft_layers=3), "num_draft_layers: config.json says 3, .* 2"),
    "rnn": (lambda t, c: c.update(rnn=False), "rnn: config.json says False, but the tensors say True"),
    "kind of number": (lambda t, c: c.update(rnn=1), "rnn: config.json says 1, but the tensors say True"),
    "quantized": (lambda t, c: c.update(quantization_config={"quant_method": "hqq"}), "hqq is not supported"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_checkpoint_that_is_not_exact_is_refused(tmp_path: Path, target: TargetModel, name: str) -> None:
    edit, message = ERRORS[name]
    w, config = tensors(), dict(CONFIG)
    edit(w, config)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(dc.write(tmp_path, w, config), target)
    assert str(tmp_path) in str(caught.value)


def test_another_algorithm_for_these_files_is_refused(tmp_path: Path, target: TargetModel) -> None:
    directory = dc.write(tmp_path, tensors(), CONFIG)
    with pytest.raises(CheckpointError, match="EAGLE was asked for, but the files hold a ReDrafter head"):
        load(directory, target, algorithm="EAGLE")
    eagle = dc.write(tmp_path / "eagle", dc.eagle_tensors(bias=False), dc.CONFIG)
    with pytest.raises(CheckpointError, match="REDRAFTER was asked for, but the files hold an EAGLE head"):
        load(eagle, target, algorithm="REDRAFTER")


def textbook(
    w: dict[str, Tensor], embed: Tensor, context: Tensor, root: int, steps: int, width: int
) -> list[tuple[float, list[int]]]:
    """Beam search, one beam and one token at a time: (log-probability, tokens), the best first."""
    alive: list[tuple[float, list[int]]] = [(0.0, [root])]
    for _ in range(steps):
        grown = []
        for score, tokens in alive:
            logp = reference_logits(w, embed, context, tokens).log_softmax(-1)
            grown += [(score + float(logp[token]), [*tokens, token]) for token in range(len(logp))]
        alive = sorted(grown, key=lambda each: -each[0])[:width]
    return alive


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (1, 5), (4, 1), (3, 3), (5, 6)])
@torch.inference_mode()
def test_beam_search_is_the_textbooks(target: TargetModel, steps: int, width: int) -> None:
    head = random_redrafter(target)
    w = dict(head.weight_views())
    contexts, roots = torch.randn(3, H, generator=torch.Generator().manual_seed(6)), torch.tensor([5, 0, 40])
    beams, scores = beam_search(head, contexts, roots, steps, width)
    assert beams.shape == scores.shape == (3, width, steps + 1)
    for row in range(3):
        expected = textbook(w, target.embed, contexts[row], int(roots[row]), steps, width)
        assert beams[row].tolist() == [tokens for _, tokens in expected]
        torch.testing.assert_close(scores[row, :, -1], torch.tensor([s for s, _ in expected]), atol=1e-4, rtol=1e-4)
        assert (scores[row].diff(dim=-1) <= 0).all()
        assert (scores[row, :, 0] == 0).all()


@pytest.mark.parametrize("size", [2, 5, 13])
@torch.inference_mode()
def test_the_drafter_proposes_the_best_nodes_of_its_beams(target: TargetModel, size: int) -> None:
    head = random_redrafter(target)
    beams_of = Beams(head, DrafterSetup(TreeConfig(3, 4, size), torch.device("cpu")))
    contexts, roots = torch.randn(2, H, generator=torch.Generator().manual_seed(7)), torch.tensor([9, 1])
    tree = beams_of._propose(3, size, contexts, roots, torch.tensor([3, 8]), BY_PROBABILITY)
    assert tree.tokens[:, 0].equal(roots)
    beams, scores = beam_search(head, contexts, roots, 3, 4)
    for row in range(2):
        worth = {
            tuple(beams[row, i, : j + 1].tolist()): float(scores[row, i, j]) for i in range(4) for j in range(1, 4)
        }
        best = sorted(worth, key=lambda prefix: -worth[prefix])[: size - 1]
        tokens = tree.tokens[row]
        found = {tuple(tokens[tree.mask[row, i]].tolist()) for i in range(1, size) if int(tokens[i]) >= 0}
        assert found == set(best)


def test_training_computes_what_is_served(target: TargetModel) -> None:
    head = random_redrafter(target)
    window = torch.randint(V, (2, 14), generator=torch.Generator().manual_seed(8))
    lesson = teach(target, window, torch.arange(V))
    features = lesson.features.unflatten(0, (2, -1))
    distribution = lesson.probs.unflatten(0, (2, -1))
    steps, w = 3, dict(head.weight_views())
    taught = list(rollout(head, lesson, steps))
    rows = 12 - steps + 1
    entropies = []
    for k, logits in enumerate(taught):
        each = logits.unflatten(0, (2, rows))
        total = 0.0
        for text in range(2):
            for t in range(rows):
                tokens = window[text, t + 1 : t + k + 2].tolist()
                expected = reference_logits(w, target.embed, features[text, t], tokens)
                torch.testing.assert_close(each[text, t], expected, atol=1e-4, rtol=1e-4)
                total -= float(distribution[text, t + k] @ expected.log_softmax(-1))
        entropies.append(total / (2 * rows))
    loss, hits = rollout_loss(head, lesson, steps)
    expected_loss = sum(0.8**k * e for k, e in enumerate(entropies)) / (1 + 0.8 + 0.64)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-4)
    for k in range(steps):
        guess = taught[k].argmax(-1).view(2, rows)
        assert hits[k].equal(guess == window[:, k + 2 : k + 2 + rows])


def test_accept_length_counts_hits_up_to_the_first_miss() -> None:
    hits = torch.tensor([[[1, 1, 0, 1]], [[1, 0, 1, 1]], [[0, 1, 1, 1]]]).bool()
    assert accept_length(hits) == 1 + (2 + 1 + 0 + 3) / 4
