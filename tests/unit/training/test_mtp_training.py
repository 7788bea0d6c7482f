"""MTP layers are trained as they are served: each pass is a draft step, and the result drafts more of the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.llm import LLM
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_family_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.mtp import MtpHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training import eagle3
from eagle_tools.training.__main__ import main
from eagle_tools.training.export import export_trained
from eagle_tools.training.heads import existing_head
from eagle_tools.training.loop import Job
from eagle_tools.training.rows.row_set import packed
from eagle_tools.training.rows.token_rows import TokenRow
from eagle_tools.training.tiny import tiny_pair
from eagle_tools.training.ttt import Lesson, rollout, teach, ttt_loss
from tests.parity.checkpoints import CASES, write
from tests.parity.test_mtp_parity import mtp_of, save_beside
from tests.parity.test_target_parity import DenseWindows
from tests.support import deepseek, mimo_v2, step3p5
from tests.support.hybrids import hybrid_config, hybrid_target
from tests.unit.training.test_capture import with_tokenizer
from tests.unit.training.test_packing import many_rows, rows
from tests.unit.training.test_packing import write as write_rows

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


def prompts(count: int, seed: int) -> list[list[int]]:
    found: list[list[int]] = torch.randint(60, (count, 4), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


PLAIN: dict[str, Any] = {"speculative_algorithm": "NONE"}
CHAINS: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "topk": 1}
CHAINS |= {"speculative_adaptive": "off", "speculative_draft_quantization": "none"}


def served(
    target: Path, asked: Sequence[list[int]], temperature: float = 0.0, **options: Any
) -> tuple[list[list[int]], float]:
    """The answers, and tokens per cycle."""
    llm = LLM(str(target), progress=False, cpu_threads=1, **options)
    results = llm.generate(asked, max_tokens=40, temperature=temperature, ignore_eos=True, seed=5, use_tqdm=False)
    metrics = [result.metrics for result in results if result.metrics is not None]
    cycles, accepted = (
        sum(getattr(each, f"num_{name}") for each in metrics) for name in ("spec_steps", "accepted_draft_tokens")
    )
    return [result.outputs[0].token_ids for result in results], 1 + accepted / max(1, cycles)


def answered_rows(target: Path, path: Path) -> Path:
    """Rows that the target writes at two temperatures."""
    made = []
    for temperature in (0.0, 0.7):
        asked = prompts(96, seed=int(10 * temperature))
        for number, (prompt, answer) in enumerate(
            zip(asked, served(target, asked, temperature, **PLAIN)[0], strict=True)
        ):
            mask = (0,) * len(prompt) + (1,) * len(answer)
            made.append(TokenRow(f"{temperature} {number}", 0, (*prompt, *answer), mask, "length"))
    return write_rows(path, made)


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm", "qwen3.5"])
def test_a_short_training_makes_the_served_layer_draft_more(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GLM's layer was trained for one pass, as published ones are. Qwen's is random, and reads captured features."""
    target, out = tmp_path / "target", tmp_path / "head"
    if family == "glm":
        pair = deepseek.random_pair(3, deepseek.GLM)
        deepseek.train(*pair, steps=10, passes=1)
        deepseek.save(*pair, target, deepseek.GLM)
    else:
        qwen = hybrid_target(62)
        qwen.embed.mul_(8)  # so that the last token says much of what follows
        deepseek.save(qwen, deepseek.random_layers(qwen), target, hybrid_config(62))
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    data = answered_rows(with_tokenizer(target, vocab), tmp_path / "rows.jsonl")
    source = ["--data", str(data)]
    if family != "glm":
        features = str(tmp_path / "features")
        capture = ["capture", "--target", str(target), "--data", str(data), "--out", features, "--aux-layers", "2"]
        assert main(capture) == 0
        source = ["--features", features]
    peak, steps = ("2e-3", "40") if family == "glm" else ("1e-2", "60")
    command = ["mtp", "--target", str(target), *source, "--out", str(out), "--length", "127", "--texts", "8"]
    assert main([*command, "--steps", steps, "--peak", peak, "--device", "cpu"]) == 0
    assert "answers accept length: " in capsys.readouterr().out
    held_out = prompts(32, seed=99)
    plain, _ = served(target, held_out, **PLAIN)
    before, length = served(target, held_out, **CHAINS)
    after, longer = served(target, held_out, **CHAINS, speculative_draft_model_path=str(out))
    assert before == after == plain
    assert longer > length + 0.15  # 2.44 to 2.72 and 1.02 to 1.26 when this was written


@pytest.mark.training
@pytest.mark.slow
def test_a_training_that_was_interrupted_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    of_glm(target, 2)
    with_tokenizer(target, 64)
    data = write_rows(tmp_path / "rows.jsonl", many_rows(60))
    monkeypatch.setattr(eagle3, "Job", partial(Job, save_every=3))
    command = ["mtp", "--target", str(target), "--data", str(data), "--length", "63", "--texts", "2", "--device", "cpu"]
    command += ["--steps", "8", "--passes", "3", "--peak", "1e-2", "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    losses = 0

    def failing(*arguments: Any) -> Any:
        nonlocal losses
        losses += torch.is_grad_enabled()
        if losses == 6:
            raise KeyboardInterrupt
        return ttt_loss(*arguments)

    monkeypatch.setattr(eagle3, "ttt_loss", failing)
    with pytest.raises(KeyboardInterrupt):
        main([*command, str(tmp_path / "parts")])
    monkeypatch.setattr(eagle3, "ttt_loss", ttt_loss)
    assert main([*command, str(tmp_path / "parts")]) == 0
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    for file in ("model.safetensors", "config.json", "curves.json", "README.md"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()
    curves = json.loads((whole / "curves.json").read_text())
    assert [step for step, _ in curves["answers accept length"]] == [0, 3, 6, 8]
    changed = [each for each in command if each != "1e-2"]
    assert main([*changed[:-2], "--peak", "2e-2", "--out", str(whole)]) == 2
    assert "(peak; see" in capsys.readouterr().err
    further = [*command, str(tmp_path / "further"), "--init", str(whole)]
    assert main(further) == 0  # from a trained layer, which is in files of its own
    before, after = (load_file(each / "model.safetensors") for each in (whole, tmp_path / "further"))
    assert before.keys() == after.keys()


@pytest.mark.parametrize("layers", ["none", "another kind"])
def test_a_target_without_layers_to_train_is_refused(
    layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = tiny_pair(tmp_path, steps=0)
    data = write_rows(tmp_path / "rows.jsonl", many_rows(60))
    start = ["--init", str(pair.draft)] if layers == "another kind" else []
    command = ["mtp", "--target", str(pair.target), "--data", str(data), "--length", "63", "--device", "cpu", *start]
    assert main([*command, "--steps", "1", "--out", str(tmp_path / "head")]) == 2
    expected = "it has no MTP layer to draft with" if layers == "none" else "NEXTN was asked for"
    assert expected in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "head").exists()
