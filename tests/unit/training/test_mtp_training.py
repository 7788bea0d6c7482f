"""MTP layers are trained as they are served: each pass is a draft step, and the result drafts more of the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_family_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.mtp import MtpHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.export import export_trained
from eagle_tools.training.heads import existing_head
from eagle_tools.training.rows.row_set import packed
from eagle_tools.training.ttt import Lesson, rollout, teach, ttt_loss
from tests.parity.checkpoints import CASES, write
from tests.parity.test_mtp_parity import mtp_of, save_beside
from tests.parity.test_target_parity import DenseWindows
from tests.support import deepseek, mimo_v2, step3p5
from tests.unit.training.test_packing import rows

PASSES, LENGTH = 5, 14


def of_deepseek(directory: Path) -> None:
    deepseek.save(*deepseek.random_pair(3), directory)


def of_glm(directory: Path, layers: int = 1) -> None:
    base = {**deepseek.GLM, "num_nextn_predict_layers": layers}
    deepseek.save(*deepseek.random_pair(3, base), directory, base)


def of_qwen(directory: Path, case: str = "qwen3.5") -> None:
    save_beside(mtp_of(write(CASES[case], directory)), directory, "qwen")


TARGETS: dict[str, Callable[[Path], object]] = {
    "deepseek": of_deepseek,
    "glm": of_glm,
    "glm, two layers": lambda directory: of_glm(directory, 2),
    "qwen3.5": of_qwen,
    "qwen3-next": lambda directory: of_qwen(directory, "qwen3-next"),
    "mimo": lambda directory: save_beside(mtp_of(write(CASES["mimo"], directory)), directory, "mimo"),
    "mimo-v2, three layers": mimo_v2.write_with_mtp,
    "step3p5, three layers": step3p5.write_with_mtp,
}


def loaded(directory: Path) -> TargetModel:
    return load_family_target(directory, Loading(progress=False, pack=False), dtype="float32")


class GrowingRows(BoundAttention):
    """A sequence that grows, as in serving: new rows see all earlier rows of their layer, or those in its window."""

    def __init__(self) -> None:
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        before = self._kv.get(layer.index)
        if before is not None:
            k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
        self._kv[layer.index] = k, v
        padded = torch.cat([q.new_zeros(len(k) - len(q), *q.shape[1:]), q])
        return DenseWindows(1, len(k)).run(padded, k, v, layer)[len(k) - len(q) :]


def served_chain(head: MtpHead, lesson: Lesson, text: int, root: int) -> list[Tensor]:
    """The logits [V] of each step of a chain over the text, after the target has read up to row `root`."""
    tokens, features = (x.unflatten(0, (lesson.batch, -1))[text] for x in (lesson.tokens, lesson.features))
    attention, positions = GrowingRows(), torch.arange(len(tokens))

    def row_before(_: int, z: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(z[:1]), z[:-1]])

    seen = slice(0, root + 1)
    shifted = row_before if head.num_layers > 1 else None
    out = head.extend(tokens[seen], head.combine(features[seen]), positions[seen], attention, shifted)
    found = [head.logits(out.normed)[-1]]
    for level in range(1, PASSES):
        row = slice(root + level, root + level + 1)
        out = head.step(level, tokens[row], out.feedback[-1:], positions[row], attention)
        found.append(head.logits(out.normed)[0])
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", TARGETS)
def test_each_pass_is_the_draft_step_of_the_layer_that_was_written(name: str, tmp_path: Path) -> None:
    TARGETS[name](tmp_path / "target")
    target, out = loaded(tmp_path / "target"), tmp_path / "head"
    new = existing_head(target, tmp_path / "target", "mtp", tmp_path / "target")
    for parameter in new.head.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.02)  # other weights than the target's files have
    export_trained(new, target, out)
    names = set(load_file(out / "model.safetensors"))
    prefix = "mtp." if name.startswith("qwen") else f"model.layers.{target.config.num_layers}."
    assert any(each.startswith(prefix) for each in names)
    trained, served = existing_head(target, out, "mtp"), load_draft(out, target, Loading(progress=False))
    assert isinstance(trained.head, MtpHead) and isinstance(served, MtpHead)
    assert trained.head.aux_boundaries == served.aux_boundaries
    texts = torch.randint(target.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    lesson = teach(target, texts, trained.draft_ids(), trained.head.aux_boundaries)
    passes = list(rollout(trained.head, lesson, PASSES))  # each [2, 12, V]
    for text in range(2):
        for root in range(LENGTH - 2 - PASSES + 1):
            for step, logits in enumerate(served_chain(served, lesson, text, root)):
                largest = float(logits.abs().max())
                torch.testing.assert_close(passes[step][text, root + step], logits, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_loss_of_packed_rows_is_that_of_rows_apart_and_moves_every_weight(layers: int, tmp_path: Path) -> None:
    of_glm(tmp_path, layers)
    target = loaded(tmp_path)
    new = existing_head(target, tmp_path, "mtp", tmp_path)
    found = []
    for windows in ([rows()[:3], rows()[3:]], [[row] for row in rows()]):
        window, packing = packed(windows, 29)
        found.append(ttt_loss(new.head, teach(target, window, new.draft_ids(), packing=packing), 3)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    found[0].backward()
    untouched = {name for name, parameter in new.head.named_parameters() if parameter.grad is None}
    assert untouched == {f"layers.{number}.block.mlp.router.correction_bias" for number in range(layers)}
