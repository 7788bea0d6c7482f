"""Features that an engine captures: they are its own, and trainings on them are those on the target."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_server.config import from_options
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_family_target, load_target, read_model_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.interface import TargetOutput
from eagle_server.ops.native.library import available
from eagle_server.plan import Chunk
from eagle_server.request import Request, SamplingParams
from eagle_tools import DEMO
from eagle_tools.training.__main__ import main
from eagle_tools.training.captured_target import CapturedTarget
from eagle_tools.training.heads import new_eagle3
from eagle_tools.training.loop import Optimizers
from eagle_tools.training.rows import feature_files
from eagle_tools.training.rows.feature_files import CapturedFeatures
from eagle_tools.training.rows.row_set import RowSet, captured_row_set, read_row_set
from eagle_tools.training.text_attention import TextAttention
from eagle_tools.training.tiny import BOUNDARIES, TinyPair, character_tokenizer, tiny_pair
from eagle_tools.training.ttt import teach, ttt_loss
from tests.support.gguf_files import write_gguf
from tests.support.hybrids import hybrid_config, hybrid_target
from tests.unit.training.test_packing import many_rows
from tests.unit.training.test_packing import write as write_rows

LENGTH = 47
IDS = torch.arange(0, 64, 2)  # a draft vocabulary
AUX = ("--aux-layers", *map(str, BOUNDARIES))
needs_kernels = pytest.mark.skipif(not available(torch.device("cpu"), torch.float32), reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), steps=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", many_rows(60))


def capture(target: Path, data: Path, out: Path, *more: str) -> CapturedFeatures:
    command = ["capture", "--target", str(target), "--data", str(data), "--out", str(out), "--length", str(LENGTH)]
    assert main([*command, *more]) == 0
    return CapturedFeatures(out)


def loss_of(head: DraftHead, target: TargetModel, rows: RowSet, step: int) -> Tensor:
    window, packing = rows.window(step, 4)
    return ttt_loss(head, teach(target, window, IDS, BOUNDARIES, packing=packing), 4)[0]


def test_the_loss_curve_of_captured_features_is_that_of_the_target(pair: TinyPair, data: Path, tmp_path: Path) -> None:
    features = capture(pair.target, data, tmp_path / "features", *AUX)
    captured = CapturedTarget(read_model_config(pair.target), features.weights(), features.facts.boundaries, "cpu")
    target = load_family_target(pair.target, Loading(progress=False, pack=False), dtype="float32")
    both = (target, read_row_set([data], 64, (), LENGTH)), (captured, captured_row_set(features, (), LENGTH))
    curves: list[list[float]] = [[], []]
    for number, (teacher, rows) in enumerate(both):
        torch.manual_seed(0)
        new = new_eagle3(teacher, BOUNDARIES, IDS, intermediate_size=128)
        optimizers = Optimizers.of(new.head)
        for step in range(12):
            loss = loss_of(new.head, teacher, rows, step)
            with torch.no_grad():  # with the same weights
                others = [loss_of(new.head, *other, step) for other in both]
            assert abs(float(others[0] - others[1])) < 1e-5
            loss.backward()
            optimizers.step(0.01 * (1 - step / 12))
            curves[number].append(float(loss.detach()))
    assert curves[0][-1] < curves[0][0] - 0.1, "the head has learned"
    np.testing.assert_allclose(*curves, rtol=0, atol=1e-3)  # Muon's bfloat16 steps make more of rounding
    hidden = torch.randn(5, 64)
    torch.testing.assert_close(captured.logits(hidden), target.logits(hidden))
    with pytest.raises(ValueError, match="no layers"):
        captured(torch.ones(4), torch.arange(4), TextAttention(1))
    with pytest.raises(ValueError, match="no features of boundary 0"):
        captured.recall(features.read(0, 2), (0, 2))


def served_features(target: Path, draft: Path, prompts: Sequence[Sequence[int]], **options: Any) -> list[Tensor]:
    """What the drafter of a server gets of each prompt's last piece, [tokens, n * H]; they are computed together."""
    engine = build_engine(
        from_options({"model_path": str(target), "speculative_draft_model_path": str(draft), **options}), progress=False
    )
    seen: dict[int, Tensor] = {}

    def see(chunks: tuple[Chunk, ...], out: TargetOutput) -> None:
        assert out.aux is not None
        for chunk, rows in zip(chunks, out.aux.split([len(chunk.tokens) for chunk in chunks]), strict=True):
            seen[chunk.sampling.params.seed] = rows.clone()

    engine.worker.verifier.prefill_observers.append(see)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=1, seed=number, temperature=0.0)
        engine.add(Request(request_id=str(number), prompt_token_ids=list(prompt), sampling=sampling))
    while engine.has_work():
        engine.step()
    return [seen[number] for number in range(len(prompts))]


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_features_of_a_quantized_target_are_those_of_its_server(
    quantization: str, pair: TinyPair, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = capture(pair.target, data, tmp_path / "features", *AUX, "--quantization", quantization)
    other = {"int8": "int4", "int4": "int8"}[quantization]
    command = ["capture", "--target", str(pair.target), "--data", str(data), "--out", str(tmp_path / "features")]
    assert main([*command, "--length", str(LENGTH), *AUX, "--quantization", other]) == 2  # no mixture
    assert "with another quantization" in capsys.readouterr().err
    rows = list(features.rows())
    prompts = [row.input_ids for row in rows]
    served = served_features(pair.target, pair.draft, prompts, quantization=quantization)
    for number, (row, expected) in enumerate(zip(rows, served, strict=True)):
        found = features.read(number, len(row.input_ids))
        assert found.dtype == torch.float32 and found.shape[1:] == (4, 64)
        assert len(expected) > 1 and torch.equal(found[-len(expected) :, :-1].flatten(1), expected)
    config = read_model_config(pair.target)
    captured = CapturedTarget(config, features.weights(), features.facts.boundaries, "cpu")
    target = load_target(pair.target, Loading(progress=False, quantization=quantization))  # type: ignore[arg-type]
    hidden = features.read(0, len(prompts[0]))[:, -1]
    logits = target.logits(hidden)
    torch.testing.assert_close(captured.logits(hidden), logits, rtol=0, atol=0.03 * float(logits.std()))
    exact = load_target(pair.target, Loading(progress=False)).logits(hidden)
    assert (captured.logits(hidden) - logits).norm() < (exact - logits).norm(), "the lm_head is the rounded one"


def test_rows_that_are_computed_in_pieces_have_all_their_features(pair: TinyPair, data: Path, tmp_path: Path) -> None:
    whole = capture(pair.target, data, tmp_path / "whole", *AUX)
    pieces = capture(pair.target, data, tmp_path / "pieces", *AUX, "--chunked-prefill-size", "16", "--page-size", "4")
    for number, row in enumerate(whole.rows()):
        tokens = len(row.input_ids)
        torch.testing.assert_close(whole.read(number, tokens), pieces.read(number, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_ranks_compute_the_features_together(pair: TinyPair, data: Path, tmp_path: Path) -> None:
    whole = capture(pair.target, data, tmp_path / "whole", *AUX)
    command = [
        sys.executable,
        "-m",
        "eagle_tools.training",
        "capture",
        "--target",
        str(pair.target),
        "--data",
        str(data),
    ]
    more = ["--out", str(tmp_path / "split"), "--length", str(LENGTH), *AUX, "--tp-size", "2"]
    subprocess.run([*command, *more], check=True, timeout=300)
    split = CapturedFeatures(tmp_path / "split")
    for name, weight in whole.weights().items():
        torch.testing.assert_close(split.weights()[name], weight)
    for number, row in enumerate(whole.rows()):
        tokens = len(row.input_ids)
        torch.testing.assert_close(split.read(number, tokens), whole.read(number, tokens), rtol=1e-4, atol=1e-4)
    more[1] = str(tmp_path / "other")  # a refusal ends all ranks
    ended = subprocess.run([*command, *more, "--max-gb", "0.0001"], timeout=300, capture_output=True, text=True)
    assert ended.returncode == 2 and "--max-gb 0.0001" in ended.stderr.splitlines()[-1]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_a_killed_capture_goes_on_and_ends_with_the_same_files(
    pair: TinyPair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feature_files, "_FILE_BYTES", 200 * 4 * 64 * 4)  # 200 tokens
    out = tmp_path / "features"
    features = capture(pair.target, data, out, *AUX)
    rows = [row for row in many_rows(60) if sum(row.loss_mask) > 1]
    assert [(row.id, row.gen, row.input_ids, row.loss_mask) for row in features.rows()] == [
        (row.id, row.gen, row.input_ids, row.loss_mask) for row in rows
    ]
    expected = contents(out)
    assert len(expected) > 5
    tokens = sum(len(row.input_ids) for row in rows)
    assert f"{len(rows)} rows of {tokens} tokens take {tokens * 1024 / 1e9:.3g} GB" in capsys.readouterr().out
    names = sorted(name for name in expected if name.startswith("features"))
    for name in names[1::2]:
        (out / name).rename(out / f"{name}.tmp")  # a file that was not whole is no file
    command = ["capture", "--target", str(pair.target), "--data", str(data), "--out", str(out), "--length", str(LENGTH)]
    train = ["eagle3", "--target", str(pair.target), "--features", str(out), "--out", str(tmp_path / "head")]
    assert main(train) == 2
    assert f"{len(names) // 2} of {len(names)} files are missing; run the capture again" in capsys.readouterr().err
    assert main([*command, *AUX]) == 0
    again = contents(out)
    assert {name: again[name] for name in expected} == expected
    assert main([*command, "--aux-layers", "1", "2"]) == 2
    assert "with another boundaries" in capsys.readouterr().err
    assert main([*command, *AUX, "--dtype", "bfloat16"]) == 2
    assert "dtype" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-gb", "0.0001"], "--max-gb 0.0001: 0.0001 GB are allowed"),
        (["--aux-layers", "2", "1"], "--aux-layers 2 1: name increasing boundaries in 0..3"),
        (["--aux-layers", "1", "9"], "in 0..3"),
        ([], "name three increasing boundaries"),
    ],
)
def test_what_cannot_be_captured_is_refused_in_one_line(
    more: list[str], message: str, pair: TinyPair, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "features"
    command = ["capture", "--target", str(pair.target), "--data", str(data), "--out", str(out)]
    layers = [] if "--aux-layers" in more or not more else AUX
    assert main([*command, *layers, *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantisation", "int8"], "did you mean --quantization?"),
        (["--port", "1"], "--port: nothing is served here; drop it"),
        (["--topk", "3"], "--topk: nothing is drafted here; drop it"),
        (["--model-path", "x"], "--model-path: --target names the model; drop it"),
        (["--dtype", "float8"], "--dtype 'float8'"),
    ],
)
def test_flags_that_have_no_effect_are_refused(
    flags: list[str], message: str, pair: TinyPair, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["capture", "--target", str(pair.target), "--data", str(data), "--out", str(tmp_path / "out"), *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_trainings_on_features_of_another_kind_are_refused(
    pair: TinyPair, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "features"
    capture(pair.target, data, out, *AUX)
    other = tiny_pair(tmp_path / "other", vocab=48, steps=0)
    command = ["--features", str(out), "--out", str(tmp_path / "head"), "--steps", "1", "--length", "31"]
    refused = {
        "captured from another target": ["eagle3", "--target", str(other.target), *command],
        "drop --data": ["eagle3", "--target", str(pair.target), *command, "--data", str(data)],
        "capture again with --aux-layers": ["block", "--target", str(pair.target), *command, "--aux-layers", "0"],
        "no features; `eagle-server train capture`": [
            *["eagle3", "--target", str(pair.target), "--features", str(tmp_path), "--out", str(tmp_path / "head")]
        ],
    }
    for message, arguments in refused.items():
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["eagle3", "medusa", "redrafter", "block"])
def test_the_command_line_trains_every_head_on_features(stage: str, pair: TinyPair, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", many_rows(200))
    capture(pair.target, data, tmp_path / "features", *AUX)
    check_training(stage, pair.target, tmp_path)


def check_training(stage: str, target: Path, directory: Path) -> None:
    """Train 40 steps on features in `directory`, and load the head beside its target."""
    command = [stage, "--target", str(target), "--features", str(directory / "features"), "--device", "cpu"]
    layers = ["--aux-layers", "1", "2"] if stage == "block" else []  # block drafters cannot read the last stream
    assert main([*command, "--out", str(directory / stage), "--steps", "40", "--length", "63", *layers]) == 0
    history = json.loads((directory / stage / "training" / f"{stage}-history.json").read_text())
    assert history["train loss"][-1][1] < history["train loss"][0][1]
    algorithm: Any = {"medusa": "MEDUSA", "redrafter": "REDRAFTER"}.get(stage)
    served = load_target(target, Loading(progress=False))
    load_draft(directory / stage, served, Loading(context=64, progress=False), algorithm=algorithm)


def with_tokenizer(directory: Path, vocab: int) -> Path:
    character_tokenizer(vocab).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    return directory


def rows_below(vocab: int, path: Path) -> Path:
    return write_rows(path, many_rows(80, vocab))


@pytest.mark.training
@pytest.mark.slow
def test_a_head_is_trained_for_a_target_with_recurrent_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(hybrid_target(24), tmp_path / "target", hybrid_config(24), torch.float32)
    target = with_tokenizer(tmp_path / "target", 24)
    data = rows_below(24, tmp_path / "rows.jsonl")
    out = ["--out", str(tmp_path / "none"), "--length", "63", "--aux-layers", "1", "2", "3"]
    assert main(["eagle3", "--target", str(target), "--data", str(data), "--steps", "2", *out]) == 2
    assert "`eagle-server train capture`" in capsys.readouterr().err
    features = capture(target, data, tmp_path / "features", "--aux-layers", "1", "2", "3")
    row = next(features.rows())
    assert features.read(0, len(row.input_ids)).isfinite().all()
    check_training("eagle3", target, tmp_path)


@needs_kernels
@pytest.mark.slow
def test_a_gguf_file_is_captured_and_trained_on(tmp_path: Path) -> None:
    shutil.copy(DEMO / "target" / "tokenizer.json", tmp_path)
    target = write_gguf(DEMO / "target", tmp_path / "demo.gguf", "Q8_0")
    data = write_rows(tmp_path / "rows.jsonl", many_rows(60))
    features = capture(target, data, tmp_path / "features")
    assert features.facts.boundaries == (2, 8, 13)
    command = ["eagle3", "--target", str(target), "--features", str(tmp_path / "features"), "--out"]
    assert main([*command, str(tmp_path / "head"), "--steps", "1", "--texts", "1", "--length", "63"]) == 0
    assert (tmp_path / "head" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Olmo2", "Cohere"])
def test_what_transformers_runs_is_captured_if_an_lm_head_makes_its_logits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path / "target")
    target = with_tokenizer(tmp_path / "target", 64)
    data = write_rows(tmp_path / "rows.jsonl", many_rows(60))
    if name == "Cohere":  # multiplies its logits by logit_scale
        command = ["capture", "--target", str(target), "--data", str(data), "--out", str(tmp_path / "features"), *AUX]
        assert main(command) == 2
        assert "makes its logits with more than an lm_head" in capsys.readouterr().err
        return
    features = capture(target, data, tmp_path / "features", *AUX)
    row = next(features.rows())
    hidden = model.model(torch.tensor([row.input_ids]), output_hidden_states=True)
    expected = torch.stack([*hidden.hidden_states[1:3], hidden.last_hidden_state], dim=2)[0]
    found = features.read(0, len(row.input_ids))[:, [0, 1, 3]]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
