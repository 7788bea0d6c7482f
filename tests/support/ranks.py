"""Engines whose target is split over ranks. The ranks are threads of this process, which talk by gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from eagle_server.engine.assembly.assemble import Surroundings, assemble
from eagle_server.engine.assembly.follow import assemble_follower
from eagle_server.engine.engine import Engine
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.ranks import RankGroup
from eagle_server.models.targets.interface import Target
from eagle_server.worker.rank_messages import RankMessage


@contextmanager
def rank_groups(size: int) -> Iterator[tuple[RankGroup, ThreadPoolExecutor, list[RankGroup]]]:
    """Rank 0, threads for the others, and the others."""
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        made = [threads.submit(RankGroup, rank, size, store, torch.device("cpu")) for rank in range(size)]
        first, *others = [each.result() for each in made]
        yield first, threads, others


@contextmanager
def split_target(directory: Path, size: int, flashinfer: type[Any] | None) -> Iterator[tuple[Target, RankGroup]]:
    """Rank 0's share of a target. Followers compute the others until the end."""
    with rank_groups(size) as (first, threads, others):
        target, *shares = [
            load_target(directory, Loading(progress=False), ranks=ranks, dtype="float32") for ranks in (first, *others)
        ]
        following = [
            threads.submit(_follow, share, ranks, None if flashinfer is None else flashinfer())
            for share, ranks in zip(shares, others, strict=True)
        ]
        yield target, first
        _stop(first, following)


def _follow(target: Target, ranks: RankGroup, flashinfer: Any) -> None:
    torch.set_num_threads(1)
    assemble_follower(target, ranks, flashinfer=flashinfer).run()


def _stop(ranks: RankGroup, following: Sequence[Future[None]]) -> None:
    ranks.send(RankMessage.STOP, ())
    for each in following:
        each.result(timeout=60)


class SplitEngines:
    """Makes engines whose target is split; `with` ends their followers. `flashinfer`: a stand-in, made per rank."""

    def __init__(self, directory: Path, size: int, flashinfer: type[Any] | None = None) -> None:
        self._directory, self._size, self._stack, self._flashinfer = directory, size, ExitStack(), flashinfer

    def __enter__(self) -> SplitEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def engine(self, draft: Callable[[Target], Any], config: EngineConfig) -> Engine:
        """`draft`: loads the draft for rank 0's share of the target."""
        target, ranks = self._stack.enter_context(split_target(self._directory, self._size, self._flashinfer))
        flashinfer = None if self._flashinfer is None else self._flashinfer()
        return assemble(target, draft(target), config, Surroundings(flashinfer=flashinfer, ranks=ranks))
