"""Two trained tiny pairs, in the published formats, and the threads that tiny tensors want."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eagle_server.models.draft import DraftHead
from eagle_server.models.load_draft import load_draft
from eagle_server.models.loader import load_target
from eagle_server.models.target import TargetModel
from eagle_server.training.tiny import tiny_pair

KINDS = {"EAGLE": "eagle", "EAGLE3": "eagle3"}


@dataclass(frozen=True)
class Pair:
    """A target and a head that was trained for it, loaded from `directory`."""

    kind: str
    directory: Path
    target: TargetModel
    head: DraftHead


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with _threads(1):
        yield


@pytest.fixture(scope="session", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    with _threads(1):  # set up before any fixture of a test
        files = tiny_pair(tmp_path_factory.mktemp(request.param), kind=KINDS[request.param])
    target = load_target(files.target, dtype="float32", progress=False)
    draft = load_draft(files.draft, target, context=target.rope.cos.shape[0], progress=False)
    assert draft.kind == request.param
    return Pair(request.param, files.target, target, draft.head)
