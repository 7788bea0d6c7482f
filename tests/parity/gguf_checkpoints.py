"""Checkpoints as GGUF files, the directories that stand for these, and what tests ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.config import DEMO_TARGET
from eagle_server.models.checkpoints.gguf import directory as module
from eagle_server.models.checkpoints.gguf.directory import directory_of
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from tests.parity.checkpoints import CASES, write
from tests.parity.test_target_parity import DenseWindows
from tests.support.engines import plain, request, run, tokens_of
from tests.support.gguf_files import write_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 512}  # whole blocks of 256 inputs


def checkpoint(name: str, directory: Path, **changes: Any) -> Path:
    if "-wide" in name:
        own = {"head_dim": 64} if name.startswith("qwen3") else {}
        write(CASES[name.replace("-wide", "")], directory, **WIDE, **own)
    elif changes:
        write(CASES[name], directory, **changes)
    elif name == "llama-biases-of-attention":
        write(CASES["llama"], directory, attention_bias=True)
    elif name == "qwen3-moe":
        write(CASES[name], directory, norm_topk_prob=True)  # as llama.cpp computes it; files do not say
    else:
        write(CASES[name], directory)
    (directory / "tokenizer.json").write_text((DEMO_TARGET / "tokenizer.json").read_text())
    return directory


def opened(source: Path, kind: str = "F32", **given: Any) -> Path:
    """The directory for a GGUF file that stands alone, but for a tokenizer."""
    (source.parent / "gguf").mkdir(exist_ok=True)
    (source.parent / "gguf" / "tokenizer.json").write_text((DEMO_TARGET / "tokenizer.json").read_text())
    return directory_of(write_gguf(source, source.parent / "gguf" / f"model-{kind}.gguf", kind, **given))


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE", tmp_path_factory.mktemp("cache") / "kernels")


@torch.inference_mode()
def logits(directory: Path, *, pack: bool = False) -> torch.Tensor:
    target: Any = load_target(directory, Loading(progress=False, pack=pack), dtype="float32")
    tokens = torch.randint(90, (20,), generator=torch.Generator().manual_seed(1))
    hidden = target(tokens, torch.arange(20), DenseWindows(1, 20)).hidden
    return target.logits(hidden)  # type: ignore[no-any-return]


def assert_speculates_losslessly(target: Any) -> None:
    requests = [request(i, list(range(3 + i, 30)), temperature=0.7 * (i % 2), seed=i) for i in range(3)]
    texts = tokens_of(run(plain(target), requests))
    engine = plain(target, ngram_steps=4, nodes=6)
    assert tokens_of(run(engine, requests)) == texts
    assert engine.stats().drafted_tokens > 0
