"""A draft that is read wrongly is warned of, whatever the budget makes of it. The demo's own drafts are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_server.config import parse_args
from eagle_server.config.sections import DEMO_TARGET
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.engine.engine import Engine
from eagle_server.text.tokenizer import load_tokenizer
from eagle_server.worker.budget.budget import AdaptiveBudget, _Choice
from eagle_server.worker.first_drafts import LEAST, TREES
from tests.support.covering import deep_unless
from tests.support.engines import FIXED_TREES, request, run

DEMO = Path(DEMO_TARGET).parent
HEADS = {"EAGLE3": "eagle3", "MEDUSA": "medusa", "REDRAFTER": "redrafter", "DFLASH": "block"}
REQUESTS = 16
EACH = pytest.mark.parametrize("name", [pytest.param(name, marks=deep_unless(name == "EAGLE3")) for name in HEADS])


def shuffled(name: str, directory: Path) -> Path:
    """The demo's head, the values of each matrix in random order."""
    shutil.copytree(DEMO / HEADS[name], directory)
    generator = torch.Generator().manual_seed(0)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for key, value in tensors.items():
            if value.ndim == 2:
                order = torch.randperm(value.numel(), generator=generator)
                tensors[key] = value.flatten()[order].view_as(value).contiguous()
        save_file(tensors, file)
    return directory


def demo(algorithm: str, *flags: str, draft: Path | None = None) -> Engine:
    path = () if draft is None else ("--speculative-draft-model-path", str(draft))
    sizes = ("--max-total-tokens", "8192", "--max-running-requests", str(REQUESTS), "--cpu-threads", "1")
    chosen = ("--model-path", str(DEMO_TARGET), "--speculative-algorithm", algorithm, *path, *sizes, *flags)
    return build_engine(parse_args(chosen, {}), progress=False)


def generate(engine: Engine, tokens: int, temperature: float = 0.0) -> str | None:
    """The warning after as many tokens of each of REQUESTS prompts."""
    tokenizer = load_tokenizer(str(DEMO_TARGET))
    prompts = json.loads((DEMO / "prompts.json").read_text())
    texts = [tokenizer.encode(prompts[number % len(prompts)]) for number in range(REQUESTS)]
    given = {"max_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    run(engine, [request(number, text, **given) for number, text in enumerate(texts)])
    return engine.stats().draft_warning


@EACH
def test_a_shuffled_head_is_warned_of_once(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = demo(name, *FIXED_TREES, draft=shuffled(name, tmp_path / "head"))
    assert generate(engine, 8) is None, "too few trees"
    warning = generate(engine, 10)
    assert warning is not None and "another target" in warning and "chat template" in warning
    assert generate(engine, 4) == warning
    assert [record.message for record in caplog.records].count(warning) == 1


def test_a_head_joined_with_ngrams_is_judged_by_the_drafts_of_both(tmp_path: Path) -> None:
    engine = demo("EAGLE3+NGRAM", *FIXED_TREES, draft=shuffled("EAGLE3", tmp_path / "head"))
    warning = generate(engine, 40)
    first = engine.worker.drafting.first_drafts
    assert first is not None and not first.is_open
    assert (warning is not None) == (first.accepted < LEAST * first.trees)


def test_a_budget_that_stops_drafting_does_not_hide_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_pays = _Choice(REQUESTS, plain=1.0)
    monkeypatch.setattr(AdaptiveBudget, "_best", lambda *_: nothing_pays)
    engine = demo("EAGLE3", draft=shuffled("EAGLE3", tmp_path / "head"))
    for _ in range(2):
        warning = generate(engine, 100)
    first = engine.worker.drafting.first_drafts
    assert first is not None and not first.is_open and warning is not None
    assert engine.stats().cycles > 190, "nearly nothing is accepted"
    assert first.trees < TREES + REQUESTS, "lessons draft, other cycles do not, and after the judgement none is counted"


@EACH
def test_the_demos_own_heads_are_not_warned_of(name: str) -> None:
    engine = demo(name, *FIXED_TREES, draft=DEMO / HEADS[name])
    assert generate(engine, 48) is None
    first = engine.worker.drafting.first_drafts
    assert first is not None and not first.is_open, "it is judged"


def test_ngrams_alone_are_never_warned_of() -> None:
    engine = demo("NGRAM", *FIXED_TREES)
    assert generate(engine, 16) is None
    assert engine.worker.drafting.first_drafts is None


def test_above_temperature_0_nothing_is_counted(tmp_path: Path) -> None:
    engine = demo("EAGLE3", *FIXED_TREES, draft=shuffled("EAGLE3", tmp_path / "head"))
    assert generate(engine, 24, temperature=0.5) is None
    first = engine.worker.drafting.first_drafts
    assert first is not None and (first.trees, first.is_open) == (0, True)
