"""The engine's composition root: a Config becomes loaded models and an Engine, every automatic value resolved."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from eagle_server.config import Config, ConfigError, SpeculativeParams, resolve_speculative
from eagle_server.engine.assemble import assemble
from eagle_server.engine.backends import caps_scores
from eagle_server.engine.cores import SharedCores
from eagle_server.engine.devices import (
    SMALL_MODEL_THREADS,
    graph_memory,
    graph_sizes,
    memory_for_kv,
    resolve_backend,
    resolve_device,
    threads_for,
)
from eagle_server.engine.drafters import kv_config
from eagle_server.engine.engine import Engine
from eagle_server.engine.pools import bytes_per_slot
from eagle_server.engine.shape import EngineConfig
from eagle_server.engine.static_trees import given_choices, with_choices, with_token_tree
from eagle_server.models.checkpoints.load_draft import Algorithm, LoadedDraft, load_draft
from eagle_server.models.checkpoints.load_target import load_target, read_model_config
from eagle_server.models.checkpoints.weights import resolve_checkpoint, resolve_file
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.models.targets.interface import Target
from eagle_server.speculation.accept import Acceptance, Lossless
from eagle_server.speculation.typical import Typical
from eagle_server.text.tokenizer import read_tokenizer_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Models:
    """A target and its draft, loaded: what engines that differ in their trees can share."""

    target: Target
    draft: LoadedDraft | None


def build_engine(config: Config, *, progress: bool = True) -> Engine:
    """Load target and draft and assemble the engine.

    Raises:
        ValueError: a value or checkpoint that cannot be served; the message says what to change.
        OSError: a file that cannot be read.
    """
    models = load_models(config, progress=progress)
    engine = engine_over(models, config)
    if config.device.cpu_threads is None and models.target.embed.device.type == "cpu":
        threads = torch.get_num_threads()
        # With more threads, less than all of them working does not mean that others want the cores.
        if 1 < threads <= SMALL_MODEL_THREADS:
            engine.cores = SharedCores(threads)
    return engine


def load_models(config: Config, *, lookahead: int = 0, progress: bool = True) -> Models:
    """Target and draft on their device, for the trees of `config` and any that need no more than `lookahead` slots.

    Raises:
        ValueError, OSError: see `build_engine`.
    """
    device = resolve_device(config)
    directory = resolve_checkpoint(config.target_path)
    facts = read_model_config(directory)
    context = _context_length(config, facts)
    shape = _shape(config, context, _trees(config, facts))
    target = load_target(
        config.target_path,
        dtype=config.model.dtype,
        context=context,
        lookahead=max(_lookahead(config, shape), lookahead),
        device=device,
        progress=progress,
    )
    torch.set_num_threads(config.device.cpu_threads or threads_for(facts))
    window = max(shape.window, lookahead)
    return Models(target, None if config.draft_path is None else _load_draft(config, target, window, progress=progress))


def engine_over(models: Models, config: Config) -> Engine:
    """An engine of `config` over models that `load_models` loaded for it.

    Raises:
        ValueError: a value that cannot be served; the message says what to change.
    """
    target, draft = models.target, models.draft if config.draft_path is not None else None
    device, trees = target.embed.device, _trees(config, target.config)
    shape = _shape(config, _context_length(config, target.config), trees)
    shape = with_token_tree(_with_medusa(config, shape, draft), draft, config.speculative.token_tree)
    algorithm = _algorithm(config, draft)
    capped = caps_scores(target) or (draft is not None and caps_scores(draft.head))
    backend = resolve_backend(config, device, target.config.dtype, capped=capped)
    drafted = kv_config(draft.head) if draft else None
    sizes = graph_sizes(config, backend, native=target.config.native and (drafted is None or drafted.native))
    memory = memory_for_kv(config, device, graph_memory(sizes, shape.draft_token_num, target.config))
    slots = config.cache.max_total_tokens or _slots_that_fit(shape, target.config, draft, memory)
    shape = replace(shape, max_total_tokens=slots, backend=backend, graph_sizes=sizes)
    resolved = _resolved(config, shape, target, trees, algorithm)
    logger.info("resolved configuration: %s", resolved)
    location = config.model.tokenizer_path or config.target_path
    return assemble(
        target,
        draft.head if draft else None,
        replace(shape, resolved=resolved),
        algorithm=algorithm,
        tokenizer=partial(read_tokenizer_file, location),
    )


def _trees(config: Config, facts: ModelConfig) -> SpeculativeParams | None:
    return resolve_speculative(config.speculative, facts.architecture) if config.speculates else None


def _algorithm(config: Config, draft: LoadedDraft | None) -> str:
    names = [draft.kind] if draft is not None else []
    return "+".join([*names, *(["NGRAM"] if config.speculative.drafts_ngrams else [])]) or "NONE"


def _context_length(config: Config, facts: ModelConfig) -> int:
    wanted = config.model.context_length
    if wanted is not None and wanted > facts.max_position:
        raise ConfigError(f"--context-length {wanted}: the model's max_position_embeddings is {facts.max_position}")
    return wanted or facts.max_position


def _shape(config: Config, context: int, trees: SpeculativeParams | None) -> EngineConfig:
    shape = EngineConfig(
        context_length=context,
        max_total_tokens=0,
        page_size=config.cache.page_size,
        max_running=config.scheduler.max_running_requests,
        chunk_tokens=config.scheduler.chunked_prefill_size,
        radix=not config.cache.disable_radix_cache,
    )
    if trees is None:
        return shape
    return replace(
        shape,
        num_steps=trees.num_steps,
        topk=trees.eagle_topk,
        draft_token_num=trees.num_draft_tokens,
        ngram_depth=trees.ngram_depth,
        ngram_share_tokens=config.speculative.shared_tokens,
        acceptance=_acceptance(config),
    )


def _acceptance(config: Config) -> Acceptance:
    posterior = config.speculative.posterior
    if posterior is None:
        return Lossless()
    logger.warning(
        "--acceptance typical is LOSSY: texts of requests with temperature above 0 do not follow the target's "
        "distribution"
    )
    return Typical(*posterior)


def _lookahead(config: Config, shape: EngineConfig) -> int:
    """Positions past the context that drafting may write, whatever kind of draft will be found."""
    choices, tree = config.speculative.medusa_choices, config.speculative.token_tree
    if tree is not None:
        return max(shape.window, len(given_choices(tree, "--speculative-token-tree")) + 1)
    section = config.speculative
    if not config.speculates or (section.head_algorithm or section.algorithm) not in (None, "MEDUSA"):
        return shape.window
    return max(shape.window, len(given_choices(choices)) + 1, section.num_draft_tokens or 0)


def _with_medusa(config: Config, shape: EngineConfig, draft: LoadedDraft | None) -> EngineConfig:
    """`shape` with a static tree if the draft is Medusa's; options that are for other drafts are refused."""
    choices = config.speculative.medusa_choices
    if draft is None or not isinstance(draft.head, MedusaHeads):
        if choices is not None:
            raise ConfigError("--medusa-choices: the draft's files hold no Medusa heads; drop it")
        return shape
    if config.speculative.given_parameters() is not None:
        raise ConfigError("--speculative-num-steps: Medusa's trees follow from --medusa-choices alone; drop it")
    shape = with_choices(shape, draft.head, choices)
    # Only tries beside it leave the number of nodes open.
    return replace(shape, draft_token_num=config.speculative.num_draft_tokens or shape.draft_token_num)


def _load_draft(config: Config, target: Target, window: int, *, progress: bool) -> LoadedDraft:
    assert config.draft_path is not None
    algorithm, token_map = cast("Algorithm | None", config.speculative.head_algorithm), config.speculative.token_map
    return load_draft(
        config.draft_path,
        target,
        algorithm=algorithm,
        context=_context_length(config, target.config),
        lookahead=window,
        token_map=None if token_map is None else resolve_file(token_map),
        overrides=config.speculative.draft_config_override,
        target_path=config.target_path,
        progress=progress,
    )


def _slots_that_fit(shape: EngineConfig, target: ModelConfig, draft: LoadedDraft | None, memory: int) -> int:
    """Slots for every request at full context, but no more than `memory` bytes hold."""
    drafted = None if draft is None else kv_config(draft.head)
    configs = [target] if drafted is None else [target, drafted]
    per_slot = sum(bytes_per_slot(c) for c in configs)
    wanted = shape.max_running * (shape.context_length + shape.window)
    slots = min(wanted, memory // per_slot)
    return slots // shape.page_size * shape.page_size


def _resolved(
    config: Config, shape: EngineConfig, target: Target, trees: SpeculativeParams | None, algorithm: str
) -> dict[str, Any]:
    """What /v1/server_info shows: the configuration with every automatic value in its place."""
    values = config.public_dict()
    values["model"].update(
        dtype=str(target.config.dtype).removeprefix("torch."),
        context_length=shape.context_length,
        architecture=target.config.architecture,
        implementation="eagle_server" if target.config.native else "transformers",
    )
    values["device"].update(
        device=str(target.embed.device),
        attention_backend=shape.backend,
        cuda_graph_batch_sizes=list(shape.graph_sizes),
        cpu_threads=torch.get_num_threads(),
    )
    values["speculative"].update(algorithm=algorithm)
    if trees is not None:
        values["speculative"].update(asdict(trees))
    if shape.choices:
        drafted = SpeculativeParams(shape.num_steps, shape.topk, shape.draft_token_num, shape.ngram_depth)
        name = "medusa_choices" if config.speculative.token_tree is None else "token_tree"
        values["speculative"].update(asdict(drafted) | {name: [list(node) for node in shape.choices]})
    values["cache"].update(max_total_tokens=shape.max_total_tokens)
    return values
