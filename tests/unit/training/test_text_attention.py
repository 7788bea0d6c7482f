"""Attention and teacher in pieces: the same numbers as with all scores and all probabilities at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_server.attention.interface import LayerSpec
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training import text_attention, ttt
from eagle_tools.training.losses import draft_loss
from eagle_tools.training.medusa import medusa_loss, new_heads
from eagle_tools.training.packing import Packing
from eagle_tools.training.recipes import LOSS_NAMES, LossName
from eagle_tools.training.redrafter import rollout_loss
from eagle_tools.training.rows.row_set import CutRow, packed
from eagle_tools.training.text_attention import TextAttention
from eagle_tools.training.ttt import Lesson, RolloutAttention, rollout, teach, ttt_loss
from tests.support.redrafter import random_redrafter
from tests.unit.training.test_training import VOCAB, random_head, random_target

BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 23, 4, 2, 8
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [0] * 24])
PACKING = Packing(DOCUMENTS, torch.ones_like(DOCUMENTS, dtype=torch.bool))


def dense(q: Tensor, passes: list[tuple[Tensor, Tensor]], packing: Packing | None, layer: LayerSpec) -> Tensor:
    """The definition, row by row: [batch * length, heads, head_dim]."""
    shift = len(passes) - 1
    queries = q.unflatten(0, (BATCH, -1))
    split = [tuple(x.unflatten(0, (BATCH, -1)).repeat_interleave(2, dim=2) for x in pair) for pair in passes]
    rows = []
    for text in range(BATCH):
        for i in range(LENGTH):
            places = [(0, j) for j in range(i - shift + 1)] + [(s, i - shift + s) for s in range(1, shift + 1)]
            if layer.sliding_window:
                places = [(s, j) for s, j in places if j > i - layer.sliding_window]
            if packing is not None:
                own = packing.documents[text]
                places = [(s, j) for s, j in places if s or own[j] == own[i]]
            zeros = torch.zeros(HEADS, SIZE)
            keys, values = (
                torch.stack([split[s][which][text, j] if j >= 0 else zeros for s, j in places]) for which in (0, 1)
            )
            scores = torch.einsum("hd,khd->hk", queries[text, i], keys) * layer.scale
            if layer.softcap:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if layer.sinks is not None:
                scores = torch.cat([scores, layer.sinks[:, None]], dim=1)
            weights = scores.softmax(-1)[:, : len(places)]
            rows.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(rows)


@pytest.mark.parametrize("packing", [None, PACKING], ids=["texts", "documents"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"sliding_window": 5}, {"sliding_window": 2}, {"softcap": 2.0}, {"sinks": torch.randn(HEADS)}],
    ids=["full", "window", "narrow", "softcap", "sinks"],
)
def test_blocks_equal_the_dense_reference(
    settings: dict[str, Any], packing: Packing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_attention, "BLOCK", 4)
    monkeypatch.setattr(text_attention, "LONG", 0)
    torch.manual_seed(0)
    layer = LayerSpec(0, 0.3, **settings)
    attention = RolloutAttention(BATCH, packing)
    passes: list[tuple[Tensor, Tensor]] = []
    for _ in range(3):
        q = torch.randn(BATCH * LENGTH, HEADS, SIZE, requires_grad=True)
        k, v = (torch.randn(BATCH * LENGTH, KV_HEADS, SIZE, requires_grad=True) for _ in range(2))
        passes.append((k, v))
        found, expected = attention.run(q, k, v, layer), dense(q, passes, packing, layer)
        valid = torch.arange(LENGTH).repeat(BATCH) >= len(passes) - 1
        torch.testing.assert_close(found[valid], expected[valid], rtol=1e-5, atol=1e-5)
        gradients = [
            torch.autograd.grad(out[valid].square().sum(), (q, k, v), retain_graph=True) for out in (found, expected)
        ]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_the_loss_of_chunks_is_that_of_all_rows_at_once(loss: LossName, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    target = random_target()
    new = random_head(target, "eagle3")
    lesson = teach(target, torch.randint(VOCAB, (2, 20)), new.draft_ids(), new.head.aux_boundaries)
    probs = lesson.probs.unflatten(0, (2, -1))
    weights = [0.8**s for s in range(3)]
    passes = list(rollout(new.head, lesson, 3))
    each = [draft_loss(loss, probs[:, s:], logits[:, s:]) for s, logits in enumerate(passes)]
    by_hand = sum(weight * value for weight, value in zip(weights, each, strict=True)) / sum(weights)
    assert isinstance(by_hand, Tensor)
    expected = torch.autograd.grad(by_hand, [*new.head.parameters()])
    for chunk in (5, 512):
        monkeypatch.setattr(ttt, "CHUNK", chunk)
        monkeypatch.setattr(ttt, "KEPT", 0 if chunk == 5 else ttt.KEPT)
        value, _ = ttt_loss(new.head, lesson, 3, loss)
        torch.testing.assert_close(value, by_hand, rtol=1e-5, atol=1e-5)
        for a, b in zip(torch.autograd.grad(value, [*new.head.parameters()]), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def other_head(kind: str, target: TargetModel) -> tuple[torch.nn.Module, Callable[[Lesson, LossName], Tensor]]:
    """A random Medusa or ReDrafter head, and the loss of a lesson."""
    if kind == "redrafter":
        head = random_redrafter(target).requires_grad_(requires_grad=True)
        return head, lambda lesson, loss: rollout_loss(head, lesson, 3, loss)[0]
    heads = new_heads(target, 3, 1, shared_lm_head=kind == "medusa, shared lm_head")
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return heads, lambda lesson, loss: medusa_loss(heads, lesson, loss)[0]


@pytest.mark.parametrize("packing", [None, PACKING], ids=["texts", "documents"])
@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("kind", ["medusa", "medusa, shared lm_head", "redrafter"])
def test_other_heads_in_chunks_have_the_loss_of_all_rows_at_once(
    kind: str, loss: LossName, packing: Packing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    target = random_target()
    model, loss_of = other_head(kind, target)
    lesson = teach(target, torch.randint(VOCAB, (2, LENGTH + 1)), torch.arange(VOCAB), packing=packing)
    found = []
    for chunk, kept in ((512, ttt.KEPT), (5, 0)):
        monkeypatch.setattr(ttt, "CHUNK", chunk)
        monkeypatch.setattr(ttt, "KEPT", kept)
        value = loss_of(lesson, loss)
        found.append((value, *torch.autograd.grad(value, [*model.parameters()])))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-6)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, and the largest with a column per token."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.by_token = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in _tensors(made):
            self.numbers = max(self.numbers, each.numel())
            if each.dim() > 1 and each.shape[-1] == VOCAB:
                self.by_token = max(self.by_token, each.numel())
        return made


def _tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, (tuple, list)):
        for each in made:
            yield from _tensors(each)


def test_no_tensor_grows_with_rows_times_vocabulary_or_rows_times_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttt, "CHUNK", 16)
    monkeypatch.setattr(ttt, "KEPT", 0)
    monkeypatch.setattr(text_attention, "LONG", 0)
    monkeypatch.setattr(text_attention, "BLOCK", 8)
    torch.manual_seed(0)
    target = random_target()
    target.rope = type(target.rope)(target.config.rope, target.config.head_dim, 1024)
    new = random_head(target, "eagle3")
    new.head.rope = target.rope
    row = (np.arange(600) % VOCAB, np.ones(600, dtype=bool))
    window, packing = packed([[CutRow(*row)]], 599)
    with Largest() as largest:
        lesson = teach(target, window, new.draft_ids(), new.head.aux_boundaries, packing=packing)
        ttt_loss(new.head, lesson, 3)[0].backward()
    assert largest.by_token == 32 * VOCAB  # the lm_head, transposed; a chunk's logits are half of that
    assert largest.numbers == 599 * 96  # three streams of 32 per token; all scores of a head would be 360,000


@pytest.mark.parametrize("kind", ["medusa", "redrafter"])
def test_no_tensor_of_other_heads_grows_with_rows_times_vocabulary(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttt, "CHUNK", 16)
    monkeypatch.setattr(ttt, "KEPT", 0)
    torch.manual_seed(0)
    target = random_target()
    _, loss_of = other_head(kind, target)
    with Largest() as largest:
        loss_of(teach(target, torch.randint(VOCAB, (10, 60)), torch.arange(VOCAB)), "kl").backward()
    assert 16 * VOCAB <= largest.by_token <= 64 * VOCAB  # a chunk, and matrices with a column per token; not 580 rows


def test_packed_rows_of_a_windowed_target_are_taught_as_rows_apart() -> None:
    torch.manual_seed(0)
    target = random_target()
    specs = [module for module in target.modules() if hasattr(module, "spec")]
    assert specs
    for module in specs:
        module.spec = replace(module.spec, sliding_window=4)  # type: ignore[assignment,arg-type,type-var]
    rows = [(np.random.default_rng(i).integers(0, VOCAB, 12), np.ones(12, dtype=bool)) for i in range(2)]
    window, packing = packed([[CutRow(*row) for row in rows]], 23)
    ids = torch.arange(VOCAB)
    found = teach(target, window, ids, packing=packing).features
    for place, (tokens, _) in enumerate(rows):
        alone = target(torch.from_numpy(tokens), torch.arange(12), TextAttention(1)).hidden
        torch.testing.assert_close(found[12 * place : 12 * place + 10], alone[:10], rtol=1e-5, atol=1e-5)
    full = teach(random_target(), window, ids, packing=packing).features
    assert not torch.allclose(found, full, atol=1e-3)
