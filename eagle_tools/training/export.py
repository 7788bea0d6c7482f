"""The demo as files: checkpoint directories in the published formats, a model card, and training curves."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.drafts.mtp_files import published_name
from eagle_server.models.checkpoints.load_target import load_family_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.checkpoints.weights import resolve_checkpoint
from eagle_server.models.config import CheckpointError
from eagle_server.models.config_json import read_config
from eagle_server.models.drafts.eagle3 import Eagle3Head
from eagle_server.models.drafts.mtp import MtpHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.block import NewBlock
from eagle_tools.training.corpus import END_OF_TEXT, standard_library_files
from eagle_tools.training.dialects import expressible, write_eagle3
from eagle_tools.training.fingerprint import target_fingerprint
from eagle_tools.training.head_card import BESIDE_A_HEAD
from eagle_tools.training.heads import NewHead
from eagle_tools.training.loop import read_history, restore
from eagle_tools.training.model_card import CardFacts, HeadFacts, heads_card, model_card
from eagle_tools.training.prompts import write_prompts
from eagle_tools.training.recipes import Dialect
from eagle_tools.training.redrafter import NewRedrafter
from eagle_tools.training.target import DEMO_TARGET, build_target

MAX_DEMO_BYTES = 28_000_000
_EVALUATION = "training/evaluation.json"
_OTHER_HEADS = ("medusa", "redrafter", "block")


def export_target(work: Path, directory: Path) -> None:
    """Write the trained demo target of `work` and its tokenizer. Weights are stored in bfloat16, served in float32."""
    model = build_target()
    restore(model, work / "target-checkpoint.pt")
    save_checkpoint(model, directory, DEMO_TARGET, torch.bfloat16)
    _write_json(directory / "config.json", DEMO_TARGET)  # its dtype is that of serving, float32
    shutil.copyfile(work / "tokenizer.json", directory / "tokenizer.json")
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": DEMO_TARGET["max_position_embeddings"],
    }
    _write_json(directory / "tokenizer_config.json", names)
    _write_json(directory / "generation_config.json", {"eos_token_id": DEMO_TARGET["eos_token_id"]})


def export_head(new: NewHead | NewRedrafter | NewBlock, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a trained head: config.json and model.safetensors."""
    save_checkpoint(new.head, directory, new.config_json, dtype)


def export_mtp(head: MtpHead, config_json: Mapping[str, Any], target: TargetModel, directory: Path) -> None:
    """Write trained MTP layers alone, under the names of the target's family, with the target's config.json.

    Raises:
        CheckpointError: our loader would not read them again as they are.
    """
    save_checkpoint(head, directory, config_json, name_of=partial(published_name, config=head.mtp))
    how = Loading(context=target.rope.cos.shape[0], progress=False, pack=False)
    loaded = load_draft(directory, target, how, algorithm="NEXTN")
    assert isinstance(loaded, MtpHead)
    read = dict(loaded.weight_views())
    for name, view in head.weight_views():
        if name in read and not torch.equal(view.bfloat16(), read[name].bfloat16()):
            raise CheckpointError(f"{directory}: {name}: other values are loaded than were trained")


def export_trained(new: NewHead, target: TargetModel, directory: Path) -> None:
    """Write a trained EAGLE head as SGLang reads it, or vLLM, or else in the format it had before; MTP layers too."""
    if isinstance(new.head, MtpHead):
        export_mtp(new.head, new.config_json, target, directory)
        return
    dialect = expressible(new.head, target) if isinstance(new.head, Eagle3Head) else None
    if dialect is None:
        export_head(new, directory)
    else:
        assert isinstance(new.head, Eagle3Head)
        write_eagle3(new.head, new.config_json, target, directory, dialect)


def convert_head(source: str, target_path: str, directory: Path, dialect: Dialect) -> None:
    """Write an EAGLE-3 head of a directory or Hub id anew, as the reader of a dialect takes it.

    Raises:
        CheckpointError: no EAGLE-3 head for this target.
        DialectError: the dialect cannot hold it.
        ValueError: `directory` is where the head is.
    """
    head_files, target_files = resolve_checkpoint(source), resolve_checkpoint(target_path)
    if directory.resolve() == head_files.resolve():
        raise ValueError(f"{directory}: holds the head itself; choose another --out")
    how = Loading(pack=False)
    target = load_family_target(target_files, how)
    head = load_draft(head_files, target, how, algorithm="EAGLE3")
    assert isinstance(head, Eagle3Head)
    verifier = {"name_or_path": target_path, "architectures": read_config(target_files).get("architectures")}
    write_eagle3(head, read_config(head_files), target, directory, dialect, target.embed.dtype, verifier)


def write_evaluation(directory: Path, numbers: Mapping[str, float]) -> None:
    """Write what `evaluate_head` found for the head in `directory`, for the model card."""
    (directory / _EVALUATION).parent.mkdir(exist_ok=True)
    _write_json(directory / _EVALUATION, numbers)


def export_demo(work: Path, assets: Path, parts: Sequence[str]) -> int:
    """Assemble `assets` from `work`, which holds the trained target and head. Returns its size in bytes.

    parts: the directories of the heads whose mean is the head, below `work`. They hold the curves.

    Raises:
        ValueError: the head is for another target, or the files are larger than a repository should carry.
    """
    _check_trained_for(work / "target", *(work / part for part in parts))
    for name in ("target", "eagle3"):
        _copy_files(work / name, assets / name)
    shutil.copyfile(work / "target-loss.png", assets / "target-loss.png")
    for part in parts:
        shutil.copyfile(work / part / "training" / "eagle3-loss.png", assets / f"{part}-loss.png")
    write_prompts(assets / "prompts.json")
    (assets / "README.md").write_text(model_card(_facts(work, assets, parts)))
    return _checked_size(assets)


def export_demo_heads(work: Path, assets: Path) -> int:
    """Add the other trained heads of `work` and their card to `assets`. Returns the new size in bytes.

    Raises:
        ValueError: a head is for another target, or the files are larger than a repository should carry.
    """
    _check_trained_for(assets / "target", *(work / name for name in _OTHER_HEADS))
    facts = {}
    for name in _OTHER_HEADS:
        _copy_files(work / name, assets / name)
        training = work / name / "training"
        shutil.copyfile(training / f"{name}-loss.png", assets / f"{name}-loss.png")
        size = sum(path.stat().st_size for path in (assets / name).iterdir())
        facts[name] = HeadFacts(read_history(training / f"{name}-history.json"), size)
    (assets / "HEADS.md").write_text(heads_card(facts))
    return _checked_size(assets)


def _check_trained_for(target: Path, *heads: Path) -> None:
    key = target_fingerprint(load_family_target(target, Loading(progress=False, pack=False), dtype="float32"))
    for head in heads:
        if json.loads((head / "training" / "recipe.json").read_text()).get("target") != key:
            raise ValueError(f"{head}: was trained for another target than {target}; train it again")


def _copy_files(source: Path, directory: Path) -> None:
    """Copy the files of a checkpoint, without the card and curves of a training."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in BESIDE_A_HEAD:
            shutil.copyfile(path, directory / path.name)


def _checked_size(assets: Path) -> int:
    size = sum(path.stat().st_size for path in assets.rglob("*") if path.is_file())
    if size > MAX_DEMO_BYTES:
        raise ValueError(f"{assets}: {size / 1e6:.1f} MB are too many, at most {MAX_DEMO_BYTES / 1e6:.0f} MB")
    return size


def _facts(work: Path, assets: Path, parts: Sequence[str]) -> CardFacts:
    recipes = (work / part / "training" / "recipe.json" for part in parts)
    _, held_out = standard_library_files()
    return CardFacts(
        target=read_history(work / "target-history.json"),
        head=json.loads((work / "eagle3" / _EVALUATION).read_text()),
        recipes=[json.loads(recipe.read_text()) for recipe in recipes],
        held_out_files=[path.relative_to(sysconfig.get_paths()["stdlib"]).as_posix() for path in held_out],
        target_bytes=(assets / "target" / "model.safetensors").stat().st_size,
        head_bytes=(assets / "eagle3" / "model.safetensors").stat().st_size,
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
