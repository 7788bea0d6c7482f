"""The registry of target families, and the import order inside of models/."""

from __future__ import annotations

import ast
from pathlib import Path

from eagle_server import models
from eagle_server.models.targets.registry import FAMILIES, find_family

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


def test_shared_layers_know_no_target_targets_know_no_draft_and_modules_know_no_checkpoint() -> None:
    for path in ROOT.rglob("*.py"):
        folder = path.parent.name if path.parent != ROOT else ""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("eagle_server.models."):
                continue
            parts = str(node.module).split(".")
            imported = parts[2] if parts[2] in ORDER else ""
            assert ORDER.index(imported) <= ORDER.index(folder), f"{path.name} may not import {node.module}"
