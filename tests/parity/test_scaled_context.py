"""The context that RoPE scaling extends: its length by config.json, and transformers' logits beyond the original."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eagle_server.attention.dense import DenseCausal
from eagle_server.config import ConfigError, parse_args
from eagle_server.engine.assembly.resolve import context_length
from eagle_server.models.checkpoints.load_target import load_target, read_model_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.models.config_json import read_config, rope_config
from tests.parity import checkpoints as native
from tests.parity import test_transformers_target as foreign
from tests.parity.test_target_parity import TOLERANCE, Pages
from tests.support.engines import plain, random_head, request, run, speculative, tokens_of

ORIGINAL, LONG = 16, 64


def _rope(kind: str, positions: int = ORIGINAL, **parameters: Any) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **parameters}
    return {"max_position_embeddings": positions, "rope_parameters": rope}


_KNOWN = {"original_max_position_embeddings": ORIGINAL}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SINGLE = {**native._DEEPSEEK, "n_group": 4, "topk_group": 2}
# The ways in which published configs declare a length. All of them mean LONG positions.
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn, the original declared (Qwen2.5)": ("llama", _rope("yarn", **_KNOWN)),
    "yarn, more than the original declared (Qwen3)": ("qwen3", _rope("yarn", 20, **_KNOWN) | {"head_dim": 32}),
    "yarn, the scaled length declared (DeepSeek)": ("llama", _rope("yarn", LONG, **_KNOWN)),
    "yarn, the original is max_position_embeddings": ("llama", _rope("yarn")),
    "yarn, no factor": ("llama", _rope("yarn", LONG, **_KNOWN, factor=None)),
    "yarn, attention factor": ("llama", _rope("yarn", **_KNOWN, attention_factor=1.3)),
    "yarn, mscale": ("deepseek-v3", _rope("yarn", **_KNOWN, mscale=0.7, mscale_all_dim=1.1) | _SINGLE),
    "yarn, original outside (Phi-3)": ("llama", _rope("yarn", LONG) | _KNOWN),
    "linear": ("llama", _rope("linear")),
    "llama3": ("llama", _rope("llama3", LONG, **_KNOWN, **_LLAMA3)),
    "dynamic": ("llama", _rope("dynamic")),
}
DEFAULTS = {"dynamic": ORIGINAL}  # its base is that of the context, so that short texts stay transformers'
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen2-moe", _rope("yarn", 20, **_KNOWN)),
    "linear": ("gpt-neox", _rope("linear")),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def context(directory: Path, *flags: str) -> int:
    """The context that a server has with these flags."""
    config = parse_args(["--model-path", str(directory), *flags], environ={})
    return context_length(config, read_model_config(directory))


def write(name: str, directory: Path) -> PreTrainedModel:
    family, settings = SCALED[name]
    return native.write(native.Case(family), directory, **settings)


def check_paged_logits(theirs: PreTrainedModel, ours: Any) -> None:
    """Texts up to the last position, in chunks that end before and behind the original length."""
    prompts = [torch.randint(native.VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (LONG, LONG - 9)]
    pages, lens = Pages(ours, 2, LONG // 16), [len(prompt) for prompt in prompts]
    cuts = [[0, 0], [ORIGINAL - 3] * 2, [ORIGINAL + 9] * 2, [n - 1 for n in lens], lens]
    chunks = [pages.logits(prompts, start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
    for prompt, *parts in zip(prompts, *chunks, strict=True):
        torch.testing.assert_close(torch.cat(parts), theirs(prompt[None]).logits[0], atol=TOLERANCE, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("name", [name for name in SCALED if name != "dynamic"])
def test_scaled_context_is_served_by_default_with_transformers_logits(name: str, tmp_path: Path) -> None:
    theirs = write(name, tmp_path)
    assert context(tmp_path) == LONG
    with pytest.raises(ConfigError, match=f"--context-length {LONG + 1}: by config.json the model has at most {LONG} "):
        context(tmp_path, "--context-length", str(LONG + 1))
    ours = load_target(tmp_path, Loading(progress=False), dtype="float32")
    check_paged_logits(theirs, ours)


@torch.inference_mode()
@pytest.mark.parametrize("name", FOREIGN)
def test_transformers_code_serves_a_scaled_context(name: str, tmp_path: Path) -> None:
    case, settings = FOREIGN[name]
    theirs = foreign.write(foreign.CASES[case], tmp_path, **settings)
    assert context(tmp_path) == LONG
    check_paged_logits(theirs, foreign.load(tmp_path))


@torch.inference_mode()
def test_dynamic_context_keeps_short_texts_by_default_and_has_one_base_if_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers changes its base with every token beyond the original; keys in the KV cache cannot follow."""
    theirs = write("dynamic", tmp_path)
    assert context(tmp_path) == ORIGINAL
    assert context(tmp_path, "--context-length", str(LONG)) == LONG
    tokens = torch.randint(native.VOCAB, (LONG,), generator=torch.Generator().manual_seed(3))
    ours = load_target(tmp_path, Loading(progress=False), dtype="float32")
    short = tokens[:ORIGINAL]
    out = ours.logits(ours(short, torch.arange(ORIGINAL), DenseCausal(1)).hidden)  # type: ignore[arg-type]
    torch.testing.assert_close(out, theirs(short[None]).logits[0], atol=TOLERANCE, rtol=0)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        longer = load_target(tmp_path, Loading(context=LONG, progress=False), dtype="float32")
    assert f"every text has the base for {LONG} tokens" in caplog.text
    whole = Pages(longer, 1, LONG // 16).logits([tokens], [0], [LONG])[0]  # type: ignore[arg-type]
    torch.testing.assert_close(whole, theirs(tokens[None]).logits[0], atol=TOLERANCE, rtol=0)
    pages = Pages(longer, 1, LONG // 16)  # type: ignore[arg-type]
    parts = [pages.logits([tokens], [a], [b])[0] for a, b in ((0, 5), (5, 30), (30, LONG))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)


def test_length_dependent_rope_on_transformers_code_is_refused_with_the_reason(tmp_path: Path) -> None:
    foreign.write(foreign.CASES["qwen2-moe"], tmp_path, **_rope("dynamic"))
    assert context(tmp_path) == ORIGINAL
    with pytest.raises(ConfigError, match=r"max_position_embeddings, as rope type 'dynamic' depends on the length"):
        context(tmp_path, "--context-length", str(ORIGINAL + 1))
    with pytest.raises(CheckpointError, match=f"beyond {ORIGINAL} tokens"):
        foreign.load(tmp_path, context=ORIGINAL + 1)
    assert foreign.load(tmp_path).config.max_position == ORIGINAL


def test_one_rope_per_layer_type_extends_nothing(tmp_path: Path) -> None:
    """Gemma 3 scales its full layers alone, and declares the scaled length."""
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
    parameters = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 10.0}}
    native.write(native.CASES["gemma3"], tmp_path, max_position_embeddings=LONG, rope_parameters=parameters)
    assert context(tmp_path) == LONG
    with pytest.raises(ConfigError, match=rf"at most {LONG} \(max_position_embeddings\)"):
        context(tmp_path, "--context-length", str(LONG + 1))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            _rope("yarn", **_KNOWN),
            r"at most 64 \(rope type 'yarn': factor 4 times 16 positions\); a factor of 7 in its",
        ),
        (_rope("dynamic"), r"at most 64 \(rope type 'dynamic': factor 4 times 16 positions\); a factor of 7 in its"),
        (
            _rope("default", LONG),
            r'at most 64 \(max_position_embeddings\); for more, set rope_type "yarn", factor 2 and original.* 64 in',
        ),
        (_rope("llama3", LONG, **_KNOWN, **_LLAMA3), "a larger max_position_embeddings there allows more"),
    ],
    ids=["yarn", "dynamic", "default", "llama3"],
)
def test_refusal_says_where_the_limit_is_from_and_how_to_extend_it(
    tmp_path: Path, rope: dict[str, Any], message: str
) -> None:
    directory = tmp_path / "target"
    native.write(native.Case("llama"), directory)
    (directory / "config.json").write_text(json.dumps({**read_config(directory), **rope}))
    with pytest.raises(ConfigError, match=message):
        context(directory, "--context-length", "100")


def test_rope_scaling_of_a_model_card_comes_before_rope_parameters(tmp_path: Path) -> None:
    """transformers does the same, except that it forgets a base that is in rope_parameters alone."""
    native.write(native.Case("llama"), tmp_path)
    raw = read_config(tmp_path)
    raw["rope_parameters"]["rope_theta"] = 500.0
    raw["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    found = rope_config(raw, LONG, "config.json")
    assert (found.kind, found.factor, found.original_max_position, found.theta) == ("yarn", 4.0, ORIGINAL, 500.0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
            r"one RoPE per layer type \(full_attention\)",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs a positive 'factor', found None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' needs a positive 'factor', found None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "needs a positive 'factor', found '4'"),
    ],
)
def test_rope_that_would_be_misread_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_config(extra, LONG, "config.json")


@pytest.mark.parametrize("name", ["yarn, the original declared (Qwen2.5)", "linear", "dynamic"])
def test_texts_beyond_the_original_length_are_transformers_with_and_without_a_head(name: str, tmp_path: Path) -> None:
    """Prompts that start below and beyond the original length; the head's own RoPE is not scaled."""
    theirs = write(name, tmp_path)
    ours = load_target(tmp_path, Loading(context=LONG, lookahead=32, progress=False), dtype="float32")
    drawn = torch.randint(1, native.VOCAB, (3, 40), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [drawn[0][:9], drawn[1][:20], drawn[2]]
    requests = [request(i, prompt, max_tokens=LONG - len(prompt), ignore_eos=True) for i, prompt in enumerate(prompts)]
    head = random_head(ours, "EAGLE3")  # type: ignore[arg-type]
    outcome = tokens_of(run(plain(ours, context_length=LONG), requests))  # type: ignore[arg-type]
    assert all(len(outcome[str(i)]) == LONG - len(prompt) for i, prompt in enumerate(prompts))
    assert tokens_of(run(speculative(ours, head, context_length=LONG), requests)) == outcome  # type: ignore[arg-type]
    if name != "dynamic":
        expected = {k: v for i in range(3) for k, v in _texts(theirs, prompts[i], i).items()}
        assert outcome == expected


def _texts(theirs: PreTrainedModel, prompt: list[int], index: int) -> dict[str, list[int]]:
    return {str(index): foreign.generated(theirs, [prompt], LONG - len(prompt))["0"]}
