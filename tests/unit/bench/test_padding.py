"""A padded pair computes what the demo computes: logits, texts, acceptance; also from files and in transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.eagle3 import Eagle3Head
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools import DEMO
from eagle_tools.bench.padding import PaddedShape, load_demo, main, pad_checkpoint, pad_head, pad_target
from tests.support.dense import Recording, features_of, follow_path
from tests.support.engines import CONTEXT, MARGIN, request, run, speculative

pytestmark = pytest.mark.deep

SHAPE = PaddedShape.tiny()
NEVER = 50.0  # how far below the best logit that of a padding token is at least
REACH = CONTEXT + MARGIN


@dataclass(frozen=True)
class Pair:
    target: TargetModel
    head: Eagle3Head


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def demo() -> Pair:
    return Pair(*load_demo(REACH))


@pytest.fixture(scope="module")
def padded(demo: Pair) -> Pair:
    return pad(demo, torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    return [tokenizer.encode(text).ids[:120] for text in json.loads((DEMO / "prompts.json").read_text())]


def pad(pair: Pair, dtype: torch.dtype, shape: PaddedShape = SHAPE) -> Pair:
    target = pad_target(pair.target, shape, device="cpu", dtype=dtype, context=REACH)
    return Pair(target, pad_head(pair.head, target, shape, device="cpu", dtype=dtype, context=REACH))


@torch.no_grad()
def target_logits(model: TargetModel, tokens: list[int]) -> Tensor:
    return model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), Recording()).hidden)


def features(pair: Pair, tokens: list[int]) -> Tensor:
    return features_of(pair.target, tokens, pair.head.aux_boundaries)


def assert_same(wide: Tensor, narrow: Tensor, relative: float) -> None:
    """Equal on the narrow vocabulary relative to the largest logit; the other logits are never the largest."""
    known = wide[:, : narrow.shape[1]]
    assert (known - narrow).abs().max() <= relative * narrow.abs().max()
    rest = wide[:, narrow.shape[1] :]
    assert rest.numel() and (rest.amax(1) < known.amax(1) - NEVER).all()
    assert rest.isfinite().all()


def test_target_logits_are_the_demos(demo: Pair, padded: Pair, prompts: list[list[int]]) -> None:
    for prompt in prompts[:4]:
        assert_same(target_logits(padded.target, prompt), target_logits(demo.target, prompt), 1e-4)


@pytest.mark.deep
@torch.no_grad()
def test_head_logits_are_the_demos_along_a_draft(demo: Pair, padded: Pair, prompts: list[list[int]]) -> None:
    path = prompts[1][:6]
    for prompt in prompts[:3]:
        narrow, wide = (follow_path(pair.head, features(pair, prompt)[:-1], prompt, path) for pair in (demo, padded))
        assert_same(wide, narrow, 1e-4)


def test_the_constant_arrives_unchanged_and_other_padding_stays_zero(padded: Pair, prompts: list[list[int]]) -> None:
    with torch.no_grad():
        streams = features(padded, prompts[0])
        hidden = padded.head.combine(streams[:-1])
        tokens, positions = torch.tensor(prompts[0][1:]), torch.arange(len(prompts[0]) - 1)
        feedback = padded.head(tokens, hidden, positions, Recording()).feedback
    for stream in (*streams.chunk(3, dim=-1), hidden, feedback):
        assert (stream[:, 256] == 2.0**-30).all()
        assert not stream[:, 257:].any()


def test_most_of_the_weights_are_not_zero(padded: Pair) -> None:
    zero_by_need = {"o_proj", "down_proj", "fc", "embed_tokens", "k_proj"}
    views = [*padded.target.weight_views(), *padded.head.weight_views()]
    for name, weight in views:
        if weight.dim() == 2 and name.split(".")[-2] not in zero_by_need:
            assert (weight == 0).float().mean() < 0.01, name


def test_new_draft_ids_mean_distinct_new_tokens(demo: Pair, padded: Pair) -> None:
    ids = padded.head.target_ids(torch.arange(SHAPE.draft_vocab_size))
    assert ids[:2048].tolist() == demo.head.target_ids(torch.arange(2048)).tolist()
    assert ids[2048:].tolist() == list(range(4096, 4396))
    assert padded.head.t2d is not None and padded.head.t2d.nonzero().flatten().tolist() == ids.sort().values.tolist()


@pytest.mark.deep
def test_engine_writes_the_demos_text_and_accepts_as_much(demo: Pair, padded: Pair, prompts: list[list[int]]) -> None:
    asked = [request(i, prompt, max_tokens=24, ignore_eos=True) for i, prompt in enumerate(prompts[:3])]
    asked.append(request("sampled", prompts[3], max_tokens=24, temperature=1.0, seed=5, ignore_eos=True))
    narrow, wide = (run(speculative(pair.target, pair.head, 3, 4), asked) for pair in (demo, padded))
    for name, finished in narrow.items():
        assert wide[name].tokens == finished.tokens
        assert wide[name].spec == finished.spec
        assert finished.spec is not None and finished.spec.accepted > 0


def test_bfloat16_mostly_decides_alike(demo: Pair, prompts: list[list[int]]) -> None:
    rough = pad(demo, torch.bfloat16)
    narrow, wide = (target_logits(target, prompts[0]) for target in (demo.target, rough.target))
    assert (wide[:, 4096:].amax(1) < wide.amax(1) - NEVER).all()
    assert (wide.argmax(1) == narrow.argmax(1)).float().mean() > 0.9


@pytest.mark.deep
def test_checkpoint_is_one_for_transformers_and_for_this_server(
    tmp_path: Path, padded: Pair, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    pad_checkpoint(tmp_path, SHAPE, dtype=torch.float32)
    ours = target_logits(padded.target, prompts[0])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    with torch.no_grad():
        assert_same(theirs(torch.tensor([prompts[0]])).logits[0], ours[:, :4096], 1e-4)
    target = load_target(tmp_path / "target", Loading(progress=False))
    assert torch.equal(target_logits(target, prompts[0]), ours)
    draft = load_draft(tmp_path / "eagle3", target, Loading(context=REACH, progress=False))
    assert draft.aux_boundaries == padded.head.aux_boundaries
    assert not caplog.messages, "its config leaves no doubt about the aux layers"
    read = dict(draft.weight_views())
    for name, weight in padded.head.weight_views():
        assert torch.equal(read[name], weight), name


def test_a_shape_that_cannot_hold_the_model_is_refused(demo: Pair) -> None:
    for change in (
        {"hidden_size": 256},
        {"num_layers": 15},
        {"head_dim": 96},
        {"num_heads": 4},
        {"vocab_size": 4000},
    ):
        with pytest.raises(ValueError, match="must be at least|must be a multiple"):
            pad(demo, torch.float32, replace(SHAPE, **change))
    with pytest.raises(ValueError, match="draft_vocab_size 2600: 2048 are expected, and up to 500 more"):
        pad(demo, torch.float32, replace(SHAPE, draft_vocab_size=2600))


@pytest.mark.deep
def test_the_command_writes_checkpoints_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--shape", "tiny"]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'target'}, {tmp_path / 'eagle3'}\n"
    target = load_target(tmp_path / "target", Loading(progress=False))
    assert (target.config.num_layers, target.config.dtype) == (PaddedShape.tiny().num_layers, torch.bfloat16)
    assert load_draft(tmp_path / "eagle3", target, Loading(context=REACH, progress=False)).aux_boundaries
