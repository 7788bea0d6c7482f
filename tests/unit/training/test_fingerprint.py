"""Caches and checkpoints of a training are used again for the same target, text, tokenizer and settings only."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from eagle_server.models.checkpoints.load_target import load_family_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_tools.training import corpus as corpus_module
from eagle_tools.training.__main__ import main
from eagle_tools.training.corpus import Corpus, own_files, standard_library, text_files, train_tokenizer
from eagle_tools.training.fingerprint import cached_arrays, target_fingerprint
from eagle_tools.training.loop import Job, Schedule, train
from eagle_tools.training.recipes import Recipe
from eagle_tools.training.sources import own_texts
from eagle_tools.training.tiny import TinyPair, tiny_pair

REMADE = "it is made again"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    torch.set_num_threads(1)
    return tiny_pair(tmp_path_factory.mktemp("pair"), steps=0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").write_text("The quick brown fox jumps over the lazy dog\n" * 60)
    (tmp_path / "data" / "more" / "b.txt").write_text("Pack my box with five dozen liquor jugs\n" * 60)
    return tmp_path / "data"


def tokenizer_of(pair: TinyPair) -> Tokenizer:
    return Tokenizer.from_file(str(pair.target / "tokenizer.json"))


def read(pair: TinyPair, data: Path, cache: Path, end: int = 0) -> Corpus:
    return own_files(tokenizer_of(pair), text_files([data]), end, cache)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a word": lambda data: (data / "a.txt").write_text("THE quick brown fox jumps over the lazy dog\n" * 60),
    "a new file": lambda data: (data / "c.txt").write_text("Sphinx of black quartz, judge my vow\n" * 60),
    "a file less": lambda data: (data / "more" / "b.txt").unlink(),
    "the order": lambda data: (data / "a.txt").rename(data / "z.txt"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_corpus_of_other_files_is_tokenized_again(
    pair: TinyPair, data: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "corpus.npz"
    first = read(pair, data, cache)
    CHANGES[name](data)
    second = read(pair, data, cache)
    assert REMADE in caplog.text
    fresh = read(pair, data, tmp_path / "other.npz")
    assert second.key == fresh.key != first.key
    assert np.array_equal(second.train, fresh.train)
    assert np.array_equal(second.held_out, fresh.held_out)


def test_corpus_of_the_same_text_is_read_from_the_cache(
    pair: TinyPair, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "corpus.npz"
    first = read(pair, data, cache)
    shutil.copytree(data, tmp_path / "moved")  # another place, other times, the same text
    monkeypatch.setattr(corpus_module, "tokenize", None)
    second = read(pair, tmp_path / "moved", cache)
    assert second.key == first.key
    assert np.array_equal(second.train, first.train)
    assert not caplog.text


def test_corpus_of_another_tokenizer_or_end_is_tokenized_again(pair: TinyPair, data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "corpus.npz"
    keys = [read(pair, data, cache, end).key for end in (0, 1)]
    other = train_tokenizer(sorted(data.rglob("*.txt")), 300)
    second = own_files(other, text_files([data]), 0, cache)
    assert len({*keys, second.key}) == 3
    assert int(second.train.max()) > int(read(pair, data, cache).train.max())


def test_standard_library_of_another_interpreter_is_tokenized_again(
    pair: TinyPair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(data.rglob("*.txt"))
    corpora = []
    for split in ((files[:1], files[1:]), (files[1:], files[:1])):
        monkeypatch.setattr(corpus_module, "standard_library_files", lambda split=split: split)
        corpora.append(standard_library(tokenizer_of(pair), 0, tmp_path / "corpus.npz"))
    assert np.array_equal(corpora[1].train, corpora[0].held_out)


def test_files_of_the_training_itself_are_no_text(pair: TinyPair, data: Path) -> None:
    out = data / "head"
    keys = []
    for _ in range(2):
        keys.append(own_files(tokenizer_of(pair), text_files([data], out), 0, out / "training" / "corpus.npz").key)
        (out / "config.json").write_text("{}")
    assert keys[0] == keys[1]


def test_cache_without_a_key_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "corpus.npz"
    np.savez(path, train=np.arange(3))
    assert cached_arrays(path, "key", lambda: {"train": np.arange(5)})["train"].tolist() == [0, 1, 2, 3, 4]
    assert caplog.text.count(REMADE) == 1
    assert len(cached_arrays(path, "key", dict)["train"]) == 5
    assert list(tmp_path.iterdir()) == [path]


def changed_target(pair: TinyPair, directory: Path) -> Path:
    """A copy with one number of one weight changed, in files of the same size."""
    shutil.copytree(pair.target, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_fingerprint_is_that_of_the_weights_not_of_the_place(pair: TinyPair, tmp_path: Path) -> None:
    shutil.copytree(pair.target, tmp_path / "copy")
    targets = [pair.target, tmp_path / "copy", changed_target(pair, tmp_path / "changed")]
    keys = [target_fingerprint(load_family_target(each, Loading(progress=False, pack=False))) for each in targets]
    assert keys[0] == keys[1] != keys[2]
    packed = load_family_target(pair.target, Loading(progress=False))
    assert target_fingerprint(packed) == keys[0]


@pytest.mark.slow
def test_texts_of_another_target_or_length_are_sampled_again(
    pair: TinyPair, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = read(pair, data, tmp_path / "corpus.npz")
    found = []
    for path, recipe in (
        (pair.target, Recipe(length=24, sampled_texts=4)),
        (changed_target(pair, tmp_path / "changed"), Recipe(length=24, sampled_texts=4)),
        (pair.target, Recipe(length=16, sampled_texts=4)),
        (pair.target, Recipe(length=16, sampled_texts=5)),
    ):
        target = load_family_target(path, Loading(progress=False, pack=False), dtype="float32")
        key = target_fingerprint(target)
        found.append(own_texts(target, corpus, recipe, tmp_path, key))
        again = own_texts(target, corpus, recipe, tmp_path, key)
        assert np.array_equal(again.train, found[-1].train)
    assert caplog.text.count(REMADE) == 3
    assert [texts.train.shape for texts in found] == [(4, 25), (4, 25), (4, 17), (5, 17)]


COMMANDS = {
    "eagle3": ["--passes", "2", "--aux-layers", "0", "2", "3"],
    "medusa": ["--heads", "2"],
    "redrafter": ["--rollout", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_training_goes_on_only_with_its_own_inputs(
    pair: TinyPair, data: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, sizes = tmp_path / "head", ["--length", "24", "--sampled-texts", "4", "--device", "cpu", *COMMANDS[kind]]

    def run(target: Path, text: Path, *more: str) -> int:
        return main([kind, "--target", str(target), "--data", str(text), "--out", str(out), *sizes, *more])

    def refused(names: str) -> bool:
        return f"other settings ({names}; see" in capsys.readouterr().err.splitlines()[-1]

    assert run(pair.target, data, "--steps", "1") == 0
    weights = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    changed = changed_target(pair, tmp_path / "changed")
    (tmp_path / "other.txt").write_text("Sphinx of black quartz, judge my vow\n" * 200)
    assert run(changed, data, "--steps", "2") == 2
    assert refused("target")
    assert run(pair.target, tmp_path / "other.txt", "--steps", "2") == 2
    assert refused("corpus")
    assert run(changed, tmp_path / "other.txt", "--steps", "2", "--peak", "0.5") == 2
    assert refused("corpus, peak, target")
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == weights
    assert run(pair.target, data, "--steps", "2") == 0
    assert json.loads((out / "training" / "recipe.json").read_text())["steps"] == 2
    assert run(pair.target, data, "--steps", "1") == 2
    assert "already at step 2, beyond the 1 asked for" in capsys.readouterr().err
    (out / "training" / "recipe.json").unlink()  # the checkpoint itself knows its inputs
    assert run(changed, data, "--steps", "3") == 2
    assert "other inputs (target); delete it" in capsys.readouterr().err


def job(directory: Path, inputs: dict[str, Any], steps: int = 2) -> Job:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    loss = lambda step: (model(torch.ones(2, 4)).square().mean(), dict[str, float]())  # noqa: E731
    return Job("small", model, directory, Schedule(steps, 0.01), loss, lambda: {"held-out loss": 0.0}, inputs)


def test_checkpoint_without_inputs_is_not_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="eagle_server")
    inputs = {"corpus": "a", "peak": 0.1, "boundaries": [1, 2], "draft_vocab": None}
    train(job(tmp_path, inputs))
    train(job(tmp_path, inputs, steps=3))
    path = tmp_path / "small-checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["inputs"]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"other inputs \(boundaries, corpus, peak\); delete it"):
        train(job(tmp_path, inputs, steps=4))
