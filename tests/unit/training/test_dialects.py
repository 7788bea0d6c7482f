"""EAGLE-3 heads as files: what SGLang's and vLLM's loaders read of them is the head, and ours loads it again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from eagle_server.llm import LLM
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_family_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.eagle3 import Eagle3Head
from eagle_server.models.drafts.interface import TargetWeights
from eagle_tools.training.__main__ import main
from eagle_tools.training.dialects import DialectError, expected_tensors, expressible, write_eagle3
from eagle_tools.training.heads import NewHead
from eagle_tools.training.recipes import DIALECTS, Dialect
from eagle_tools.training.tiny import tiny_pair
from eagle_tools.training.ttt import rollout, teach
from tests.unit.training.test_training import random_head, random_target


def files_of(directory: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", "pt") as stored:
        names = list(stored.keys())
        return config, {name: tuple(stored.get_slice(name).get_shape()) for name in names}


def read_by_sglang(directory: Path) -> tuple[int, ...]:
    """The boundaries that SGLang reads, after a check that each of its parameters is in the file and no other."""
    config, shapes = files_of(directory)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    hidden, heads, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size, width, vocab = config["head_dim"], config["intermediate_size"], config["vocab_size"]
    nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert shapes == {
        "fc.weight": (hidden, len(nested) * config["target_hidden_size"]),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys * size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys * size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * size),
        "midlayer.mlp.gate_proj.weight": (width, hidden),
        "midlayer.mlp.up_proj.weight": (width, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, width),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "d2t": (config["draft_vocab_size"],),
        "t2d": (vocab,),
    }
    return tuple(output + 1 for output in nested)


def read_by_vllm(directory: Path) -> tuple[int, ...]:
    """The boundaries that vLLM reads of speculators' files, after a check of names, shapes and required keys."""
    config, shapes = files_of(directory)
    layer = config["transformer_layer_config"]
    assert (config["architectures"], config["speculators_model_type"]) == (["Eagle3Speculator"], "eagle3")
    assert {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"} <= config.keys()
    proposal = config["speculators_config"]
    assert (proposal["algorithm"], proposal["default_proposal_method"]) == ("eagle3", "greedy")
    assert proposal["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert proposal["verifier"].keys() == {"name_or_path", "architectures"}
    first = {name for name in shapes if name.startswith("layers.0.")}
    assert len(first) == 10 and not any(name.startswith(("midlayer", "verifier_")) for name in shapes)
    assert shapes.keys() - first == {"fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    assert shapes["embed_tokens.weight"] == (layer["vocab_size"], layer["hidden_size"])
    assert shapes["layers.0.self_attn.q_proj.weight"][1] == 2 * layer["hidden_size"]
    assert shapes["lm_head.weight"] == (config["draft_vocab_size"], layer["hidden_size"])
    stated = config.get("eagle_aux_hidden_state_layer_ids")  # else the nested ids, unchanged
    return tuple(stated or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])


@pytest.mark.slow
@pytest.mark.training
def test_a_converted_head_is_read_by_both_loaders_and_drafts_as_before(tmp_path: Path) -> None:
    pair = tiny_pair(tmp_path, steps=12)
    files: dict[str, Path] = {"before": pair.draft, "sglang": tmp_path / "s", "speculators": tmp_path / "v"}
    source = "before"
    for dialect in DIALECTS:  # the second is made of the first
        ends = ["--head", str(files[source]), "--target", str(pair.target), "--out", str(files[dialect])]
        assert main(["convert", *ends, "--format", dialect]) == 0
        source = dialect
    target = load_family_target(pair.target, Loading(progress=False, pack=False))
    before = load_draft(pair.draft, target, Loading(context=64, progress=False))
    assert read_by_sglang(files["sglang"]) == read_by_vllm(files["speculators"]) == before.aux_boundaries
    prompts = ["Some words 42", "another one"]
    asked: dict[str, Any] = {"speculative_num_steps": 3, "topk": 1, "speculative_adaptive": "off", "cpu_threads": 1}
    found = []
    for path in files.values():
        llm = LLM(str(pair.target), speculative_draft_model_path=str(path), progress=False, **asked)
        results = llm.generate(prompts, max_tokens=24, temperature=0)
        found.append([(each.outputs[0].text, each.metrics) for each in results])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_written_is_loaded_as_the_same_head(tmp_path: Path, dialect: Dialect) -> None:
    torch.manual_seed(0)
    target = random_target()
    new = random_head(target, "eagle3")
    assert isinstance(new.head, Eagle3Head)
    write_eagle3(new.head, new.config_json, target, tmp_path, dialect, torch.float32)
    assert (read_by_sglang if dialect == "sglang" else read_by_vllm)(tmp_path) == (1, 2, 3)
    loaded = load_draft(tmp_path, target, Loading(context=64, progress=False, pack=False))
    assert isinstance(loaded, Eagle3Head)
    lesson = teach(target, torch.arange(24).view(2, 12), new.draft_ids(), new.head.aux_boundaries)
    with torch.no_grad():
        for before, after in zip(rollout(new.head, lesson, 3), rollout(loaded, lesson, 3), strict=True):
            assert torch.equal(before, after)


def variant(new: NewHead, **flags: Any) -> Eagle3Head:
    """A head like `new` with other flags, and values everywhere."""
    target = random_target()
    assert isinstance(new.head, Eagle3Head)
    head = Eagle3Head(replace(new.head.eagle, **flags), 64, TargetWeights(target.embed, target.lm_head))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    head.set_vocabulary(new.draft_ids())
    return head


def test_a_head_is_refused_by_a_format_that_cannot_hold_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = random_target()
    new = random_head(target, "eagle3")
    for flags, why in (
        ({"norm_before_residual": True}, "norm_before_residual is not read by SGLang"),
        ({"feature_norm": "concat"}, "input_norm.weight is not read by SGLang"),
        ({"own_embed": True}, "embed_tokens.weight is not read by SGLang"),
        ({"fc_bias": True}, "fc.bias is not read by SGLang"),
    ):
        head = variant(new, **flags)
        assert expressible(head, target) == (None if "fc_bias" in flags else "speculators")
        with pytest.raises(DialectError, match=why):
            write_eagle3(head, new.config_json, target, tmp_path / "no", "sglang")
    assert not (tmp_path / "no").exists()


def test_eagle31_flags_are_written_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = random_target()
    new = random_head(target, "eagle3")
    for number, flags in enumerate(
        (
            {"feature_norm": "each", "norm_output": True},
            {"feature_norm": "concat", "norm_output": True, "norm_before_residual": True},
        )
    ):
        head = variant(new, **flags)
        dialect = expressible(head, target)
        assert dialect == DIALECTS[number]
        write_eagle3(head, new.config_json, target, tmp_path / str(number), dialect)


def test_missing_and_broken_tensors_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    target = random_target()
    new = random_head(target, "eagle3")
    assert isinstance(new.head, Eagle3Head)
    views = dict(new.head.weight_views())
    assert expected_tensors(new.head.eagle, "sglang").keys() == views.keys()
    with monkeypatch.context() as patch:
        patch.setattr(new.head, "weight_views", lambda: iter([*views.items()][1:]))
        with pytest.raises(DialectError, match=r"fc.weight should have the shape \[32, 96\], found \[\]"):
            write_eagle3(new.head, new.config_json, target, tmp_path, "sglang")
    with torch.no_grad():
        new.head.norm.weight[3] = torch.nan
    with pytest.raises(DialectError, match=r"norm.weight has values that are not finite"):
        write_eagle3(new.head, new.config_json, target, tmp_path, "sglang")
