"""Targets that run transformers' code: logits over paged KV and the engine's texts equal those of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.olmo.modeling_olmo import OlmoMLP
from transformers.utils import logging as transformers_logging

from eagle_server.attention.dense import DenseCausal
from eagle_server.config import ConfigError, parse_args
from eagle_server.engine.assembly.devices import graph_sizes
from eagle_server.models.checkpoints import load_target as load_target_module
from eagle_server.models.checkpoints.load_target import load_target, read_model_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.transformers_config import TESTED
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.moe import ExpertLinear
from eagle_server.models.targets.transformers import TransformersTarget
from eagle_server.ops.native.library import available, use_native
from tests.lossless.scenes import as_on_a_gpu
from tests.lossless.test_formats import FORMATS, check_against_plain_decoding
from tests.parity.test_target_parity import TOLERANCE, Pages
from tests.support.engines import (
    CONTEXT,
    admit_without_reserve,
    plain,
    random_head,
    request,
    run,
    speculative,
    tokens_of,
)

VOCAB = 131
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2}
_WINDOWED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MINISTRAL_ROPE = {  # queries grow with every 16 positions
    **{"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
}
_GEMMA = {**_GROUPED, "head_dim": 32}
# With experts, because the dense decoder is written out. Layers of two shapes; the last ones may read the KV of the
# last layer of their kind before them.
_GEMMA4 = {
    **_GROUPED,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 7,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 10.0,
}


@dataclass(frozen=True)
class Case:
    """A model_type of transformers, and its config keys besides `_SHAPE`."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "apertus": Case("apertus", _GROUPED),
    "arcee": Case("arcee", _GROUPED),
    "cohere": Case("cohere", {**_GROUPED, "logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": Case("cohere2", {**_GROUPED, **_WINDOWED}),
    "ernie4.5": Case("ernie4_5", _GROUPED),
    "exaone4": Case("exaone4", {**_GROUPED, **_WINDOWED}),
    "gemma": Case("gemma", _GEMMA),
    "gemma2": Case(
        "gemma2",
        {
            **_GEMMA,
            **_WINDOWED,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "glm": Case("glm", {**_GROUPED, "head_dim": 16}),
    "glm4": Case("glm4", {**_GROUPED, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "gpt2": Case("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt-bigcode": Case("gpt_bigcode", {"multi_query": True}),
    "gpt-neox": Case("gpt_neox", {"use_parallel_residual": True}),
    "granite": Case("granite", {**_GROUPED, "logits_scaling": 3.0, "residual_multiplier": 0.4}),
    "granite-moe": Case("granitemoe", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-swa": Case("granite_swa", {**_GROUPED, **_WINDOWED, "layer_rope_theta": [9000.0, 0, 5000.0]}),
    "hunyuan": Case("hunyuan_v1_dense", {**_GROUPED, "head_dim": 16}),
    "llama4": Case("llama4_text", {**_GROUPED, "intermediate_size_mlp": 80, "head_dim": 16, "num_local_experts": 4}),
    "ministral": Case("ministral", {**_GROUPED, **_WINDOWED, "head_dim": 16}),
    "ministral3": Case("ministral3", {**_GROUPED, "head_dim": 16, "rope_parameters": _MINISTRAL_ROPE}),
    "mixtral": Case("mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "nemotron": Case("nemotron", {**_GROUPED, "head_dim": 16}),
    "olmo": Case("olmo", {**_GROUPED, "clip_qkv": 2.0}),
    "olmo2": Case("olmo2", _GROUPED),
    "olmo3": Case("olmo3", {**_GROUPED, **_WINDOWED}),
    "olmoe": Case("olmoe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": Case("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": Case("phi", _GROUPED),
    "phi3": Case("phi3", {**_GROUPED, "sliding_window": 7}),
    "qwen2-moe": Case("qwen2_moe", {**_GROUPED, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "seed-oss": Case("seed_oss", {**_GROUPED, "head_dim": 16}),
    "smollm3": Case("smollm3", _GROUPED),
    "stablelm": Case("stablelm", {**_GROUPED, "use_qkv_bias": True}),
    "starcoder2": Case("starcoder2", {**_GROUPED, "sliding_window": 7}),
}


# Families of this package, which transformers' code can run as well: layers that share KV, and KV of two shapes.
NATIVE = {
    "gemma4": Case("gemma4_text", {**_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}),
    "gemma4-keys-are-values": Case(
        "gemma4_text", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    ),
}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_target_module, "find_family", lambda _: None)  # for NATIVE
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


def write(case: Case, directory: Path, **settings: Any) -> PreTrainedModel:
    """Save a random checkpoint of the case in float32 and return transformers' model of it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[case.model_type](**{**_SHAPE, **case.settings, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, spread = (1.0, 0.3) if "norm" in name else (0.0, 2.0 if "sinks" in name else 0.15)
            parameter.normal_(mean, spread)
    model.tie_weights()
    model.eval().save_pretrained(directory)
    return model


def test_the_shapes_of_config_json_are_those_of_the_survey(tmp_path: Path) -> None:
    write(NATIVE["gemma4"], tmp_path)
    shapes = read_model_config(tmp_path).pool_layers
    assert shapes == load(tmp_path).config.pool_layers
    assert len(shapes) == 4 and len(set(shapes)) == 2, "the last two of six layers write none"


def test_the_list_of_tested_architectures_is_correct() -> None:
    names = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type] for case in CASES.values()}
    assert names == set(TESTED)


def load(directory: Path, **settings: Any) -> TransformersTarget:
    target = load_target(directory, Loading(progress=False, **settings), dtype="float32")
    assert isinstance(target, TransformersTarget)
    return target


# The gate has those that differ most: capped scores and windows, learned positions, one KV head, parallel
# blocks, scaled residuals, sinks, experts, clipped projections, norms of queries and keys, fused weights.
QUICK = {"gemma2", "gpt2", "gpt-bigcode", "gpt-neox", "granite", "granite-swa", "mixtral", "olmo", "olmo2", "phi3"}
CASES_BY_TIME = [pytest.param(name, marks=() if name in QUICK else (pytest.mark.deep,)) for name in {**CASES, **NATIVE}]


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES_BY_TIME)
def test_paged_logits_and_features_equal_transformers(name: str, tmp_path: Path) -> None:
    """Unequal prompts in two chunks, then one token each. Also the residual streams for EAGLE-3 heads."""
    theirs, ours = write({**CASES, **NATIVE}[name], tmp_path), load(tmp_path)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (n,), generator=generator) for n in (5, 16, 17, 45)]
    lens = [len(prompt) for prompt in prompts]
    pages = Pages(ours, len(prompts), 3)
    steps = [([0] * 4, [n // 2 for n in lens]), ([n // 2 for n in lens], [n - 1 for n in lens])]
    chunks = [pages.logits(prompts, start, stop) for start, stop in [*steps, ([n - 1 for n in lens], lens)]]
    for prompt, *parts in zip(prompts, *chunks, strict=True):
        torch.testing.assert_close(torch.cat(parts), theirs(prompt[None]).logits[0], atol=TOLERANCE, rtol=0)
    if any(ours.config.windows):
        return  # the rest compares dense features
    out = ours(prompts[1], torch.arange(16), DenseCausal(1), (0, 2))
    states = theirs(prompts[1][None], output_hidden_states=True).hidden_states
    assert out.aux is not None
    torch.testing.assert_close(out.aux, torch.cat([states[0], states[2]], -1)[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(out.hidden, states[-1][0], atol=TOLERANCE, rtol=0)


def generated(theirs: PreTrainedModel, prompts: Sequence[list[int]], count: int) -> dict[str, list[int]]:
    settings = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    theirs.generation_config.eos_token_id = None
    texts = {}
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        texts[str(i)] = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
    return texts


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.deep) for n in ("gemma2", "gemma4", "mixtral"))]
)
def test_greedy_text_with_any_drafter_is_what_transformers_generates(name: str, tmp_path: Path) -> None:
    """N-grams, a draft model (itself) and an EAGLE-3 head, with preemption, prefix hits, chunks, and FlashInfer."""
    theirs, ours = write({**CASES, **NATIVE}[name], tmp_path), load(tmp_path, context=CONTEXT)
    drawn = torch.randint(1, VOCAB, (4, 40), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [each[: 10 * i + 3] for i, each in enumerate(drawn)]
    expected = generated(theirs, prompts, 24)
    requests = [request(i, prompt, max_tokens=24, ignore_eos=True) for i, prompt in enumerate(prompts)]
    drafts: list[tuple[Any, dict[str, Any]]] = [
        (None, {"steps": 0, "topk": 1, "ngram_steps": 4, "nodes": 8, "chunked_prefill_size": 7}),
        (DraftLM(ours), {"max_total_tokens": 112, "page_size": 4}),
        (random_head(ours, "EAGLE3"), {"chunked_prefill_size": 16}),  # type: ignore[arg-type]
    ]
    if name != "gemma2":  # FlashInfer refuses its capped scores
        drafts.append((DraftLM(ours), as_on_a_gpu((2, 4))))  # in emulated CUDA graphs
    for draft, settings in drafts:
        engine = speculative(ours, draft, **settings)  # type: ignore[arg-type]
        admit_without_reserve(engine.scheduler)
        for again in (False, True):
            outcome = run(engine, requests[:2], joining={3: requests[2:]})
            assert tokens_of(outcome) == expected
            if "max_total_tokens" not in settings:
                assert (sum(finished.cached_tokens for finished in outcome.values()) > 0) == again
        assert engine.stats().accepted_tokens > 0 or not isinstance(draft, DraftLM)
        assert (engine.stats().preemptions > 0) == ("max_total_tokens" in settings)


@pytest.mark.skipif(not available(torch.device("cpu"), torch.float32), reason="needs the native kernels")
@pytest.mark.parametrize("form", [pytest.param(n, marks=() if n == "int8" else pytest.mark.deep) for n in FORMATS])
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.deep) for n in ("gemma2", "phi", "olmo2"))]
)
def test_texts_in_every_format_are_those_of_plain_decoding_alone(name: str, form: str, tmp_path: Path) -> None:
    """Native kernels compute attention and linear layers, so a row's bits do not depend on the other rows."""
    write(CASES[name], tmp_path)
    check_against_plain_decoding(tmp_path, form, seed=5)


@pytest.mark.skipif(not available(torch.device("cpu"), torch.float32), reason="needs the native kernels")
@torch.inference_mode()
@pytest.mark.parametrize("name", ["granite-moe", "mixtral", "olmoe", "qwen2-moe"])
def test_native_kernels_compute_experts_and_round_them_if_asked(name: str, tmp_path: Path) -> None:
    theirs, tokens = write(CASES[name], tmp_path), torch.arange(1, 25)
    expected = theirs(tokens[None]).logits[0]
    errors = []
    for quantization in (None, "int8"):
        target = load(tmp_path, quantization=quantization)
        packed = [module for module in target.modules() if isinstance(module, ExpertLinear)]
        assert not target.experts()
        assert {part.native[0].quantization for part in packed if part.native is not None} == {quantization}
        found = Pages(target, 1, 2).logits([tokens], [0], [len(tokens)])[0]  # type: ignore[arg-type]
        errors.append(float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median()))
    most = 0.4 if name == "granite-moe" else 0.1  # rounding its other layers alone changes the logits as much
    assert errors[0] < 1e-5 < errors[1] < most  # of most rows: after rounding some choose another expert


def test_experts_that_transformers_computes_are_not_rounded(tmp_path: Path) -> None:
    write(CASES["llama4"], tmp_path)
    with pytest.raises(CheckpointError, match=r"--quantization int8: Llama4ForCausalLM has experts .* drop it"):
        load(tmp_path, quantization="int8")


@pytest.mark.parametrize("name", ["granite-moe", "mixtral", "qwen2-moe", "llama4"])
def test_experts_by_transformers_code_do_not_wait_for_the_device(name: str, tmp_path: Path) -> None:
    write(CASES[name], tmp_path)
    use_native("torch")
    try:
        assert load(tmp_path).config.waits == ""
    finally:
        use_native("auto")


def test_a_forward_that_waits_for_the_device_is_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(CASES["olmo"], tmp_path)
    assert graph_sizes(parse_args([], environ={}), "flashinfer", load(tmp_path).config)
    inner = OlmoMLP.forward
    monkeypatch.setattr(OlmoMLP, "forward", lambda self, x: inner(self, x if x.sum() > 0 else x))
    waiting = load(tmp_path).config
    assert graph_sizes(parse_args([], environ={}), "flashinfer", waiting) == ()
    with pytest.raises(ConfigError, match=r"--cuda-graph-max-bs: OlmoForCausalLM .* waits .*\(aten.*; drop it"):
        graph_sizes(parse_args(["--cuda-graph-max-bs", "4"], environ={}), "flashinfer", waiting)


def test_capped_scores_are_refused_on_flashinfer(tmp_path: Path) -> None:
    write(CASES["gemma2"], tmp_path)
    with pytest.raises(ValueError, match="does not cap attention scores, which this model does: use torch_native"):
        plain(load(tmp_path, context=CONTEXT), **as_on_a_gpu(()))


REFUSED = {
    "state": (Case("mamba"), r"keep more than keys and values \(linear_attention\)"),
    "alibi": (Case("bloom"), "should ask transformers' attention interface once each, and ask 0 times"),
    "bidirectional": (Case("bert", {"is_decoder": False}), "its attention is not causal"),
    "long rope": (
        Case(
            "phi3",
            {
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "factor": 8.0,
                },
            },
        ),
        "'longrope' depends on how long a text is beyond 32 tokens; add --context-length 32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_features_are_refused_by_name(name: str, tmp_path: Path) -> None:
    case, message = REFUSED[name]
    write(case, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_values_per_layer_that_cannot_be_served_are_a_checkpoint_error(tmp_path: Path) -> None:
    """transformers raises an error of its own where one value of a config is asked for that each layer has."""
    write(CASES["granite"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["per_layer_config"] = {"0": {"head_dim": 32}, "1": {"head_dim": 16}, "2": {"head_dim": 16}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="'GraniteForCausalLM' cannot be served: .*head_dim"):
        read_model_config(tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize("extra", ["model.layers.3.", "mtp."])
def test_mtp_layers_that_nobody_asked_for_are_left_alone(tmp_path: Path, extra: str) -> None:
    """transformers skips only numbers that its classes list."""
    write(CASES["olmo2"], tmp_path)
    expected = load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"{extra}eh_proj.weight": torch.ones(64, 128), f"{extra}enorm.weight": torch.ones(64)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.arange(9)
    found = load(tmp_path)
    assert torch.equal(found(tokens, tokens, DenseCausal(1)).hidden, expected(tokens, tokens, DenseCausal(1)).hidden)


def test_a_short_context_makes_length_dependent_rope_constant(tmp_path: Path) -> None:
    write(REFUSED["long rope"][0], tmp_path)
    assert load(tmp_path, context=32).config.max_position == CONTEXT


def test_inexact_files_are_refused(tmp_path: Path) -> None:
    write(CASES["olmo2"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 4, "layer_types": None}))
    with pytest.raises(CheckpointError, match="missing tensors: model.layers.3"):
        load(tmp_path)


MISREAD: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"intermediate_size": 95}, r"mismatched tensors: .*down_proj.weight \(expected shape .*95\], found .*96"),
    "vocabulary": ({"vocab_size": 160}, r"lm_head.weight \(expected shape \[160, 64\], found \[131, 64\]\)"),
    "heads": ({"num_key_value_heads": 0}, "transformers cannot load it"),
    "type": ({"rms_norm_eps": "1e-5"}, "transformers cannot read it .*rms_norm_eps"),
    "null": ({"tie_word_embeddings": None}, "transformers cannot read it .*tie_word_embeddings"),
    "length": ({"max_position_embeddings": -4}, "max_position_embeddings must be a positive integer, found -4"),
}


@pytest.mark.parametrize("name", MISREAD)
def test_config_that_contradicts_the_files_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    changes, message = MISREAD[name]
    write(CASES["granite"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write(CASES["granite"], tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 50, -1000):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model.safetensors: not a readable safetensors file"):
            load(tmp_path)
    file.rename(tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(whole)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002.safetensors, which is not there"):
        load(tmp_path)


def test_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MarsForCausalLM"], "model_type": "mars"}))
    with pytest.raises(CheckpointError, match="'MarsForCausalLM' is not supported here, and transformers cannot read"):
        read_model_config(tmp_path)
