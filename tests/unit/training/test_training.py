"""Draft-head training: the training-time test is the served computation, and what is saved loads again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_family_target, load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.eagle3 import Eagle3Head
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_tools.training.__main__ import main
from eagle_tools.training.corpus import train_tokenizer
from eagle_tools.training.export import MAX_DEMO_BYTES, export_demo, export_head, export_target, write_evaluation
from eagle_tools.training.fingerprint import target_fingerprint
from eagle_tools.training.generate import continue_texts
from eagle_tools.training.heads import NewHead, default_boundaries, new_eagle, new_eagle3
from eagle_tools.training.loop import Job, Schedule, train
from eagle_tools.training.recipes import DEMO_HEAD, DEMO_PARTS, DEMO_TUNINGS, Kind
from eagle_tools.training.target import build_target
from eagle_tools.training.tiny import tiny_pair
from eagle_tools.training.ttt import accuracies, chain_length, rollout, teach, ttt_loss

VOCAB = 40


def random_target(layers: int = 4) -> TargetModel:
    config = read_target_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
        }
    )
    target = TargetModel(config, 64)
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return target.requires_grad_(requires_grad=False)


def random_head(target: TargetModel, kind: str) -> NewHead:
    new = new_eagle3(target, (1, 2, 3), torch.arange(0, VOCAB, 2), 48) if kind == "eagle3" else new_eagle(target, 48)
    for parameter in new.head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return new


class OneByOne(BoundAttention):
    """Attention of one sequence that is extended row by row, as in serving; every earlier row is visible."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            return DenseCausal(1).run(q, k, v, layer)
        repeat = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(x).repeat_interleave(repeat, dim=1) for x in (self.keys, self.values))
        weights = (torch.einsum("qhd,khd->hqk", q, keys) * layer.scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_each_pass_equals_drafting_step_by_step(kind: str) -> None:
    torch.manual_seed(0)
    target, passes = random_target(), 4
    new = random_head(target, kind)
    texts = torch.randint(VOCAB, (2, 14))
    lesson = teach(target, texts, new.draft_ids(), new.head.aux_boundaries)
    with torch.no_grad():
        trained = list(rollout(new.head, lesson, passes))  # per pass [2, 12, Vd]
        tokens, features = lesson.tokens.view(2, -1), lesson.features.view(2, 12, -1)
        for text in range(2):
            for last_true in range(12 - passes):
                attention, hidden = OneByOne(), new.head.combine(features[text, : last_true + 1])
                rows = torch.arange(last_true + 1)
                for step in range(passes):
                    output = new.head(tokens[text, rows], hidden, rows, attention)
                    row = last_true + step
                    torch.testing.assert_close(new.head.logits(output.normed)[-1], trained[step][text, row])
                    hidden, rows = output.feedback[-1:], torch.tensor([row + 1])


def test_a_lesson_pairs_each_feature_with_the_next_token_and_the_distribution_after_it() -> None:
    torch.manual_seed(0)
    target = random_target()
    new = random_head(target, "eagle3")
    text = torch.randint(VOCAB, (1, 9))
    lesson = teach(target, text, new.draft_ids(), new.head.aux_boundaries)
    output = target(text[0], torch.arange(9), DenseCausal(1), new.head.aux_boundaries)
    assert lesson.tokens.tolist() == text[0, 1:8].tolist()
    assert lesson.following.tolist() == text[0, 2:9].tolist()
    assert lesson.positions.tolist() == list(range(7))
    assert output.aux is not None
    torch.testing.assert_close(lesson.features, output.aux[:7])
    torch.testing.assert_close(lesson.probs, target.logits(output.hidden).softmax(-1)[1:8, ::2])


def test_only_passes_and_rows_inside_the_text_count() -> None:
    hits = torch.zeros(3, 1, 6, dtype=torch.bool)
    hits[0], hits[1, :, 1:], hits[2, :, 2] = True, True, True
    hits[1, :, 0] = hits[2, :, :2] = True  # chains that begin before the text
    assert accuracies(hits) == [1.0, 1.0, 0.25]
    assert chain_length(hits) == pytest.approx(1 + 2 + 0.25)  # one of the four chains reaches its third step


def test_loss_ignores_probability_outside_the_draft_vocabulary_and_counts_it_as_misses() -> None:
    torch.manual_seed(0)
    target = random_target()
    new = random_head(target, "eagle3")
    texts = torch.randint(VOCAB, (2, 10))
    loss, hits = ttt_loss(new.head, teach(target, texts, new.draft_ids(), new.head.aux_boundaries), 2)
    assert not hits[:, (texts[:, 2:] % 2) == 1].any()  # odd ids are not in the draft vocabulary
    loss.backward()
    assert all(parameter.grad is not None for parameter in new.head.parameters())
    assert target.embed.grad is None


def test_greedy_continuation_is_the_argmax_of_the_whole_text() -> None:
    torch.manual_seed(0)
    target = random_target()
    prompts = torch.randint(VOCAB, (3, 5))
    texts = continue_texts(target, prompts, 8, torch.zeros(3), torch.Generator().manual_seed(1))
    assert torch.equal(texts[:, :5], prompts)
    logits = target.logits(target(texts.reshape(-1), torch.arange(13).repeat(3), DenseCausal(3)).hidden)
    assert torch.equal(logits.view(3, 13, -1)[:, 4:-1].argmax(-1), texts[:, 5:])


def test_continuations_follow_the_distribution_of_the_target() -> None:
    torch.manual_seed(0)
    target, count = random_target(), 4000
    prompts = torch.tensor([[3, 1]]).repeat(count, 1)
    texts = continue_texts(target, prompts, 1, torch.ones(count), torch.Generator().manual_seed(1))
    distribution = target.logits(target(prompts[0], torch.arange(2), DenseCausal(1)).hidden)[-1].softmax(-1)
    found = texts[:, 2].bincount(minlength=VOCAB) / count
    assert float((found - distribution).abs().sum()) / 2 < 0.06  # total variation; sampling noise gives about 0.03


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_tiny_pair_loads_and_its_drafts_are_partly_right(tmp_path: Path, kind: Kind) -> None:
    pair = tiny_pair(tmp_path, kind=kind)
    target = load_target(pair.target, Loading(progress=False))
    draft = load_draft(pair.draft, target, Loading(context=512, progress=False))
    assert draft.algorithm == kind.upper()
    head = draft
    prompts = torch.randint(64, (48, 5), generator=torch.Generator().manual_seed(7))
    for temperature in (0.0, 1.0):
        texts = continue_texts(target, prompts, 40, torch.full((48,), temperature), torch.Generator().manual_seed(8))
        count = head.d2t.shape[0] if isinstance(head, Eagle3Head) and head.d2t is not None else 64
        lesson = teach(target, texts, head.target_ids(torch.arange(count)), head.aux_boundaries)
        _, hits = ttt_loss(head, lesson, 3)
        assert 1.3 < chain_length(hits[..., 5:]) < 3.7
    text = "Some words 42"
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def small_job(directory: Path, steps: int, fails_at: int | None = None) -> Job:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 1))

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        if step == fails_at:
            raise KeyboardInterrupt
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        return (model(x) - x.sum(-1, keepdim=True)).square().mean(), {"accuracy": 0.5}

    schedule = Schedule(steps, peak=0.01, warmup=3)
    return Job("small", model, directory, schedule, loss, lambda: {"held-out loss": 0.0}, {}, log_every=1, save_every=5)


@pytest.mark.training
@pytest.mark.slow
def test_an_interrupted_training_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = small_job(tmp_path / "whole", 12)
    history = train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(small_job(tmp_path / "parts", 12, fails_at=8))
    resumed = small_job(tmp_path / "parts", 12)
    assert train(resumed).curves == history.curves
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (tmp_path / "parts" / "small-loss.png").stat().st_size > 1000


@pytest.mark.training
@pytest.mark.slow
def test_the_command_line_trains_a_head_for_a_target_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = tiny_pair(tmp_path, steps=0)
    (tmp_path / "data.txt").write_text("The quick brown fox jumps over the lazy dog\n" * 200)
    command = ["eagle3", "--target", str(pair.target), "--data", str(tmp_path / "data.txt"), "--out"]
    sizes = ["--steps", "3", "--passes", "2", "--length", "32", "--sampled-texts", "8", "--draft-vocab", "40"]
    head, layers = str(tmp_path / "head"), ["--aux-layers", "0", "2", "3"]
    assert main([*command, head, *sizes]) == 2
    assert "--aux-layers" in capsys.readouterr().err.splitlines()[-1]
    assert main([*command, head, *sizes, *layers]) == 2  # training/ holds the settings without --aux-layers
    assert "choose another --out" in capsys.readouterr().err.splitlines()[-1]
    assert main([*command, head + "2", *sizes, *layers, "--device", "cpu"]) == 0
    loaded = load_draft(
        head + "2", load_target(pair.target, Loading(progress=False)), Loading(context=512, progress=False)
    )
    assert loaded.aux_boundaries == (0, 2, 3)
    capsys.readouterr()
    further = ["--init", head + "2", "--loss", "kl+tv", "--temperatures", "1", "0.7", "--texts", "8"]
    assert main([*command, head + "3", *sizes[:-2], *further, "--device", "cpu"]) == 0
    assert "T=1 coupled accept length: " in capsys.readouterr().out
    before, after = load_file(f"{head}2/model.safetensors"), load_file(f"{head}3/model.safetensors")
    assert before.keys() == after.keys()
    assert torch.equal(before["d2t"], after["d2t"])
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    assert main([*command, head + "4", *sizes, *further, "--device", "cpu"]) == 2
    assert "cannot be set" in capsys.readouterr().err.splitlines()[-1]
    assert main(["eagle3", "--target", str(tmp_path / "nowhere"), "--out", head]) == 2
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.training
@pytest.mark.slow
def test_the_demo_is_exported_in_the_published_formats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    work, assets, target = tmp_path / "work", tmp_path / "demo", build_target()
    for name in (*DEMO_PARTS, "eagle3"):
        (work / name / "training").mkdir(parents=True)
    torch.save({"model": {n: p.detach() for n, p in target.named_parameters()}}, work / "target-checkpoint.pt")
    train_tokenizer(sorted(Path(__file__).parent.glob("*.py")), 300).save(str(work / "tokenizer.json"))
    export_target(work, work / "target")
    new = new_eagle3(target, default_boundaries(16), torch.arange(0, 4096, 2), DEMO_HEAD.intermediate_size or 0)
    export_head(new, work / "eagle3")
    (work / "target-history.json").write_text('{"held-out loss": [[1900, 2.0]]}')
    names = [
        f"{label} {what}"
        for label in ("T=0", "T=1", "T=1 coupled", "T=1 TV")
        for what in ("accept length", *(f"step {i}" for i in (1, 2, 3, 4)))
    ]
    write_evaluation(work / "eagle3", dict.fromkeys(["held-out loss", *names], 0.5))
    key = target_fingerprint(load_family_target(work / "target", Loading(progress=False, pack=False)))
    (work / "target-loss.png").write_bytes(b"")
    for name, recipe in zip(DEMO_PARTS, (DEMO_HEAD, *DEMO_TUNINGS), strict=True):
        training = work / name / "training"
        (training / "eagle3-loss.png").write_bytes(name.encode())
        (training / "recipe.json").write_text(json.dumps(dataclasses.asdict(recipe) | {"target": key}))
    before = (training / "recipe.json").read_text()
    (training / "recipe.json").write_text(before.replace(key, "another"))
    with pytest.raises(ValueError, match=f"{DEMO_PARTS[-1]}: was trained for another target"):
        export_demo(work, assets, DEMO_PARTS)
    (training / "recipe.json").write_text(before)
    assert export_demo(work, assets, DEMO_PARTS) < MAX_DEMO_BYTES
    card = (assets / "README.md").read_text()
    assert "PSF License" in card
    assert "900 steps of 6144 rows by `kl`; the same and then 500 steps of 2048 rows by `tv`; " in card
    assert (assets / "eagle3-kl-loss.png").read_text() == "eagle3-kl"
    loaded = load_target(assets / "target", Loading(progress=False))
    assert loaded.config.dtype == torch.float32
    torch.testing.assert_close(loaded.embed, target.embed.detach().bfloat16().float(), rtol=0, atol=0)
    draft = load_draft(assets / "eagle3", loaded, Loading(context=1024, progress=False), algorithm="EAGLE3")
    assert draft.aux_boundaries == (2, 8, 13)
    assert draft.target_ids(torch.tensor([0, 1, 2047])).tolist() == [0, 2, 4094]
