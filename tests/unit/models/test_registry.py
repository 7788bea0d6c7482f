"""The registry of target families, and the import order inside of models/."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from eagle_server import models
from eagle_server.models.config import CheckpointError
from eagle_server.models.targets.registry import FAMILIES, find_family, read_target_config
from tests.support.engines import random_config

ROOT = Path(models.__path__[0])
ORDER = ("", "targets", "drafts", "checkpoints")  # "": shared layers and configs


def test_family_names_are_unique() -> None:
    assert len({family.architecture for family in FAMILIES}) == len(FAMILIES)
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)


def test_a_family_is_found_by_either_of_its_names() -> None:
    for family in FAMILIES:
        assert find_family({"architectures": [family.architecture]}) is family
        assert find_family({"model_type": family.model_type}) is family
    assert find_family({"architectures": ["GPT2LMHeadModel"], "model_type": "llama"}) is None
    assert find_family({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}) is FAMILIES[0]


GEMMA3, GPT_OSS = {"model_type": "gemma3_text"}, {"model_type": "gpt_oss", "num_local_experts": 4}
ROPES = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
MISTAKES: list[dict[str, Any]] = [
    {"model_type": ["llama"]},
    {**GEMMA3, "query_pre_attn_scalar": None},
    {**GEMMA3, "query_pre_attn_scalar": 0},
    {**GEMMA3, "sliding_window": [7]},
    {**GEMMA3, "rope_local_base_freq": "x"},
    {**GEMMA3, "max_position_embeddings": None},
    {**GEMMA3, "layer_types": 3},
    {**GEMMA3, "rope_parameters": ROPES, "rope_scaling": "linear"},
    {"model_type": "gemma4_text", "per_layer_config": 3},
    {**GPT_OSS, "swiglu_limit": [7]},
    {**GPT_OSS, "layer_types": True},
    {**GPT_OSS, "num_experts_per_tok": 5},
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_value_that_cannot_be_is_refused_with_the_name_of_the_file(mistake: dict[str, Any]) -> None:
    raw = {key: value for key, value in random_config().items() if key != "architectures"} | mistake
    with pytest.raises(CheckpointError, match=r"^dir/config\.json: "):
        read_target_config(raw, "dir/config.json")


def test_shared_layers_know_no_target_targets_know_no_draft_and_modules_know_no_checkpoint() -> None:
    for path in ROOT.rglob("*.py"):
        folder = path.relative_to(ROOT).parts[0] if path.parent != ROOT else ""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("eagle_server.models."):
                continue
            parts = str(node.module).split(".")
            imported = parts[2] if parts[2] in ORDER else ""
            assert ORDER.index(imported) <= ORDER.index(folder), f"{path.name} may not import {node.module}"
