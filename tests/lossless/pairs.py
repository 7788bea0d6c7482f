"""Tiny targets and drafts in the published formats. Each pair is trained in seconds, at its first use."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from eagle_server.models.checkpoints.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_tools.training.heads import Kind
from eagle_tools.training.tiny import tiny_medusa, tiny_pair
from tests.lossless.scenes import REQUESTS
from tests.support import deepseek
from tests.support.engines import MARGIN, plain, run, tokens_of
from tests.support.redrafter import trained_redrafter
from tests.support.scoring import NEAR_TIE, in_float64, slack


@dataclass(frozen=True)
class Pair:
    """A target, a draft trained for it (`head` None: no draft), and the files of both."""

    kind: str
    directory: Path
    draft: Path | None
    target: TargetModel
    head: Any


Maker = Callable[[Path], Pair]


def alone(directory: Path) -> Pair:
    """No draft."""
    return _loaded("NONE", tiny_pair(directory, kind="eagle", steps=0).target, None)


def eagle(directory: Path) -> Pair:
    return _tiny("EAGLE", "eagle", directory)


def eagle3(directory: Path) -> Pair:
    return _tiny("EAGLE3", "eagle3", directory)


def medusa(directory: Path) -> Pair:
    files, heads = tiny_pair(directory, kind="eagle", steps=0), directory / "heads"
    tiny_medusa(load_target(files.target, dtype="float32", progress=False, pack=False), heads)
    return _loaded("MEDUSA", files.target, heads)


def redrafter(directory: Path) -> Pair:
    files, draft = tiny_pair(directory, kind="eagle", steps=0), directory / "redrafter"
    new = trained_redrafter(load_target(files.target, dtype="float32", progress=False, pack=False))
    save_checkpoint(new.head, draft, new.config_json, torch.float32)
    return _loaded("REDRAFTER", files.target, draft)


def nextn(directory: Path) -> Pair:
    """A DeepSeek target. Its MTP layer is the draft."""
    target, head = deepseek.random_pair()
    deepseek.train(target, head)
    saved = deepseek.save(target, head, directory / "target")
    return _loaded("NEXTN", saved, saved)


def standalone(directory: Path) -> Pair:
    """A target, and in smaller/ a draft model with its first two layers, which often predicts the same token."""
    files, smaller = tiny_pair(directory, kind="eagle", steps=1), directory / "smaller"
    whole = load_target(files.target, dtype="float32", progress=False, pack=False)
    raw = json.loads((files.target / "config.json").read_text()) | {"num_hidden_layers": 2}
    part, theirs = TargetModel(read_target_config(raw), 8), dict(whole.weight_views())
    with torch.no_grad():
        for name, mine in part.weight_views():
            mine.copy_(theirs[name])
    save_checkpoint(part, smaller, raw, torch.float32)
    shutil.copy(files.target / "tokenizer.json", smaller)
    return _loaded("STANDALONE", files.target, smaller)


class Pairs:
    """Makes each pair once, in a folder of `directory`. The processes of `pytest -n` share the directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pairs: dict[Maker, Pair] = {}
        self._texts: dict[str, dict[str, list[int]]] = {}

    def of(self, maker: Maker) -> Pair:
        if maker not in self._pairs:
            self._pairs[maker] = self._made_once(maker)
        return self._pairs[maker]

    def _made_once(self, maker: Maker) -> Pair:
        directory = self.directory / maker.__name__
        directory.mkdir(parents=True, exist_ok=True)
        made = directory / "pair.json"
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if made.exists():
                kind, target, draft = json.loads(made.read_text())
                return _loaded(kind, Path(target), None if draft is None else Path(draft))
            pair = maker(directory)
            made.write_text(
                json.dumps([pair.kind, str(pair.directory), None if pair.draft is None else str(pair.draft)])
            )
            return pair

    def texts(self, pair: Pair) -> dict[str, list[int]]:
        """Outputs of plain decoding for the scenes' requests, once per target. None of the draws is a near-tie."""
        key = weights_of(pair)
        if key not in self._texts:
            texts, exact = tokens_of(run(plain(pair.target), REQUESTS)), in_float64(pair.target)
            assert min(slack(exact, each, texts[each.request_id]) for each in REQUESTS) > NEAR_TIE
            self._texts[key] = texts
        return self._texts[key]


def weights_of(pair: Pair) -> str:
    """The same for pairs with the same target."""
    return sha256((pair.directory / "model.safetensors").read_bytes()).hexdigest()


def _tiny(kind: str, name: Kind, directory: Path) -> Pair:
    files = tiny_pair(directory, kind=name)
    return _loaded(kind, files.target, files.draft)


def _loaded(kind: str, directory: Path, draft: Path | None) -> Pair:
    target = load_target(directory, dtype="float32", progress=False)
    if draft is None:
        return Pair(kind, directory, None, target, None)
    return Pair(kind, directory, draft, target, loaded_head(kind, directory, draft, target))


def loaded_head(kind: str, directory: Path, draft: Path, target: TargetModel) -> Any:
    """The draft of a pair, for the target in `directory` or a rank's share of it."""
    context = target.rope.cos.shape[0]
    algorithm = "STANDALONE" if kind == "STANDALONE" else None
    loaded = load_draft(
        draft, target, algorithm=algorithm, context=context, lookahead=MARGIN, target_path=directory, progress=False
    )
    assert loaded.algorithm == kind
    return loaded
