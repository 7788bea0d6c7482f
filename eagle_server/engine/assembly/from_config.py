"""The engine's composition root: load the models, resolve the configuration, assemble the engine."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from eagle_server.algorithms import NONE
from eagle_server.config import Config, HubGGUF
from eagle_server.engine.assembly.assemble import Surroundings, assemble
from eagle_server.engine.assembly.cores import SharedCores
from eagle_server.engine.assembly.devices import (
    SMALL_MODEL_THREADS,
    as_served,
    load_kernels_early,
    resolve_device,
    rounding_of_draft,
    threads_for,
)
from eagle_server.engine.assembly.follow import assemble_follower
from eagle_server.engine.assembly.resolve import context_length, lookahead_bound, resolve, server_info
from eagle_server.engine.engine import Engine
from eagle_server.engine.process import Rank
from eagle_server.machine import stay_on_one_node
from eagle_server.models.checkpoints.drafts.load_draft import load_draft, own_draft
from eagle_server.models.checkpoints.load_target import dtype_name, load_target, read_model_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import resolve_checkpoint, resolve_file
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.models.ranks import RankGroup
from eagle_server.models.targets.interface import Target
from eagle_server.ops.native.library import set_threads, use_native
from eagle_server.text.tokenizer import read_tokenizer_file
from eagle_server.worker.follower import Follower

if TYPE_CHECKING:
    from eagle_server.engine.kv_events import KVEventPublisher

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModels:
    """A target and its draft. Engines with different trees can share them."""

    target: Target
    draft: DraftModel | None


def build_engine(config: Config, *, progress: bool = True) -> Engine:
    """Load target and draft and assemble the engine.

    Raises:
        ValueError: a value or checkpoint that cannot be served; the message says what to change.
        OSError: a file that cannot be read.
    """
    publisher = _publisher(config)  # first: an endpoint that is taken is noticed before the models are loaded
    config = with_own_drafts(config)
    models = load_models(config, progress=progress)
    return engine_over(models, config, publisher=publisher, cores=_cores(config, models.target))


def with_directory(config: Config) -> Config:
    """`config` with the directories that stand for GGUF files in the files' places, under the target file's name.

    Raises:
        CheckpointError: a file cannot be served, or it is neither here nor on the Hub.
    """
    target, draft = config.gguf, config.draft_gguf
    if target is None and draft is None:
        return config
    from eagle_server.models.checkpoints.gguf.directory import directory_of  # needs the package gguf for these alone
    from eagle_server.models.checkpoints.gguf.hub_files import hub_model

    target, draft = (hub_model(*file) if isinstance(file, HubGGUF) else file for file in (target, draft))
    changed: dict[str, Any] = {}
    if target is not None:
        directory = directory_of(target, tokenizer=config.model.tokenizer_path is None)
        own = {"model_path": str(directory), "served_model_name": config.served_model_name}
        changed["model"] = config.model.model_copy(update=own)
    if draft is not None:
        is_model = config.speculative.drafts.is_model
        if target is None or draft.resolve() != target.resolve():
            directory = directory_of(draft, tokenizer=is_model, alone=not is_model)
        changed["speculative"] = config.speculative.model_copy(update={"draft_model_path": str(directory)})
    return config.model_copy(update=changed)


def with_own_drafts(config: Config) -> Config:
    """`config` with the drafts in the target's own files, if its options name none and do not ask for plain decoding.

    Drafts that are not supported are named in the log. The target's files are downloaded if they are not here.

    Raises:
        CheckpointError: the target's files cannot be read.
    """
    if config.speculates or config.speculative.algorithm == NONE:
        return config
    directory = resolve_checkpoint(config.target_path)
    try:
        row = own_draft(directory, read_model_config(directory))
    except CheckpointError as error:
        logger.warning("plain decoding, as the draft in the target's own files cannot be used: %s", error)
        return config
    if row is None:
        return config
    logger.info("the target's own files hold %s, which drafts; --speculative-algorithm NONE: plain decoding", row.holds)
    return config.model_copy(update={"speculative": config.speculative.model_copy(update={"algorithm": row.name})})


def _cores(config: Config, target: Target) -> AbstractContextManager[None]:
    """What shares a CPU's cores with other processes."""
    threads, chosen = torch.get_num_threads(), config.device.cpu_threads is not None
    # With more threads, idle ones do not mean that other processes want the cores.
    if not chosen and target.embed.device.type == "cpu" and not target.is_fused and 1 < threads <= SMALL_MODEL_THREADS:
        return SharedCores(threads)
    return nullcontext()


def build_rank(config: Config, rank: Rank) -> Engine | Follower:
    """Load this rank's share of the target. Rank 0 also loads the draft and gets the engine; the others follow it.

    Raises:
        ValueError, OSError: see `build_engine`.
    """
    device = resolve_device(config, rank.number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    publisher = _publisher(config) if rank.number == 0 else None
    ranks = RankGroup(rank.number, rank.size, FileStore(rank.rendezvous, rank.size), device)
    config = with_own_drafts(config)
    models = load_models(config, ranks=ranks, progress=rank.number == 0)
    return (
        engine_over(models, config, ranks, publisher) if rank.number == 0 else assemble_follower(models.target, ranks)
    )


def load_models(
    config: Config, *, lookahead: int = 0, progress: bool = True, ranks: RankGroup | None = None
) -> LoadedModels:
    """Load target and draft, for the trees of `config` and all trees that need at most `lookahead` slots.

    `ranks`: load only this rank's share of the target, and the draft on rank 0 only.

    Raises:
        ValueError, OSError: see `build_engine`.
    """
    if ranks is None and config.device.tp_size > 1:
        raise ValueError(f"--tp-size {config.device.tp_size}: only the server starts the processes that this needs")
    device = resolve_device(config) if ranks is None else ranks.device
    use_native(config.device.cpu_kernels)
    if device.type == "cpu" and ranks is None:
        stay_on_one_node(config.device.cpu_threads)
    facts = as_served(config, device, read_model_config(resolve_checkpoint(config.target_path)))
    context, lookahead = context_length(config, facts), max(lookahead_bound(config, facts), lookahead)
    load_kernels_early(config, device, facts)
    began = time.perf_counter()
    how = Loading(context, lookahead, progress=progress, quantization=config.model.quantization)
    target = load_target(
        config.target_path,
        how,
        dtype=dtype_name(facts.dtype),
        device=device,
        quantization_cache=config.model.quantization_cache,
        ranks=ranks,
    )
    logger.info("target %s: %.1f s", config.target_path, time.perf_counter() - began)
    threads = config.device.cpu_threads or max(1, threads_for(facts) // config.device.tp_size)
    set_threads(threads, fused=False)
    drafts = config.draft_path is not None and (ranks is None or ranks.rank == 0)
    draft = _load_draft(config, target, how) if drafts else None
    set_threads(threads, fused=target.is_fused and (draft is None or draft.is_fused))
    if device.type == "cpu" and config.speculates and not target.is_fused and (ranks is None or ranks.rank == 0):
        logger.warning(
            "texts with speculation may differ in near-ties from those without: torch computes all or part of this "
            "model, and its rounding depends on the number of rows"
        )
    return LoadedModels(target, draft)


def _load_draft(config: Config, target: Target, how: Loading) -> DraftModel:
    assert config.draft_path is not None
    token_map, began = config.speculative.token_map, time.perf_counter()
    rounding = rounding_of_draft(config, target.embed.device, target.config.dtype)
    draft = load_draft(
        config.draft_path,
        target,
        replace(how, quantization=rounding),
        algorithm=config.speculative.head_algorithm,
        token_map=None if token_map is None else resolve_file(token_map),
        overrides=config.speculative.draft_config_override,
        target_path=config.target_path,
    )
    logger.info("draft %s: %.1f s", config.draft_path, time.perf_counter() - began)
    return draft


def _publisher(config: Config) -> KVEventPublisher | None:
    events = config.cache.published_events
    if events is None:
        return None
    from eagle_server.engine.kv_events import KVEventPublisher  # needs zmq, which the GPU benchmark does without

    return KVEventPublisher(
        events.endpoint,
        events.replay_endpoint,
        topic=events.topic,
        buffer_steps=events.buffer_steps,
        hwm=events.hwm,
    )


def engine_over(
    models: LoadedModels,
    config: Config,
    ranks: RankGroup | None = None,
    publisher: KVEventPublisher | None = None,
    cores: AbstractContextManager[None] | None = None,
) -> Engine:
    """An engine of `config` over models that `load_models` loaded for it.

    Raises:
        ValueError: a value that cannot be served; the message says what to change.
    """
    target, draft = models.target, None if config.draft_path is None else models.draft
    resolved = resolve(config, target, draft)
    document = server_info(config, resolved, target)
    logger.debug("resolved configuration: %s", document)
    around = Surroundings(
        document=document,
        tokenizer=partial(read_tokenizer_file, config.model.tokenizer_path or config.target_path),
        ranks=ranks,
        publisher=publisher,
        cores=cores or nullcontext(),
    )
    return assemble(target, draft, resolved, around)
