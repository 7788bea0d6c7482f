"""A draft that is rounded alone: texts are those without, and only its own weights are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_server.config import Config, ConfigError, parse_args
from eagle_server.engine.assembly.from_config import LoadedModels, engine_over, load_models
from eagle_server.engine.assembly.memory_estimate import memory_estimate
from eagle_server.models.layers import Linear
from tests.support.covering import covering
from tests.support.engines import request, run, tokens_of

FIXED = ("--speculative-adaptive", "off", "--max-total-tokens", "2048", "--cpu-threads", "1")


def options(*flags: str) -> Config:
    return parse_args([*FIXED, *flags], environ={})


def sizes(models: LoadedModels) -> list[int]:
    """Bytes of the linear layers' weights: the target's and the draft's."""
    modules: list[Any] = [models.target, models.draft]
    return [sum(each.nbytes for each in model.modules() if isinstance(each, Linear)) for model in modules]


@pytest.mark.parametrize(
    ("rounding", "dtype", "target"),
    covering(["int8", "int4", "none"], ["float32", "bfloat16"], [None, "int4"], together=2),
)
def test_texts_and_the_target_stay(rounding: str, dtype: str, target: str | None) -> None:
    base = ("--dtype", dtype, *(() if target is None else ("--quantization", target)))
    usual, config = (
        options(*base),
        options(*base, "--speculative-draft-quantization", rounding),
    )
    models = load_models(config, progress=False)
    before, after = sizes(load_models(usual, progress=False)), sizes(models)
    assert before[0] == after[0]
    kept = rounding == (target or "int8")
    assert (before[1] == after[1]) == kept
    requests = [
        request(i, list(range(5 + i, 40)), temperature=0.7 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        for i in range(4)
    ]
    engine = engine_over(models, config)
    texts = tokens_of(run(engine, requests))
    assert engine.stats().accepted_tokens > 0
    alone = load_models(options_without(base), progress=False)
    assert texts == tokens_of(run(engine_over(alone, options_without(base)), requests))


def options_without(base: tuple[str, ...]) -> Config:
    plain = ("--speculative-algorithm", "NONE", "--max-total-tokens", "2048", "--cpu-threads", "1")
    return parse_args([*plain, *base], environ={})


def test_a_dry_run_counts_it() -> None:
    whole, rounded = (
        memory_estimate(options("--dtype", "bfloat16", *flags))["draft_weights"]
        for flags in (("--speculative-draft-quantization", "none"), ())
    )
    assert 0.4 * whole < rounded < 0.8 * whole


def test_what_no_kernel_computes_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU computes with fp8")
    with pytest.raises(ConfigError, match="--speculative-draft-quantization fp8: only GPUs compute with fp8"):
        load_models(options("--speculative-draft-quantization", "fp8"), progress=False)
