"""From options and loaded models to an EngineConfig: every automatic size gets its number here."""

from __future__ import annotations

import logging
import math
from typing import Any

from eagle_server.algorithms import ALGORITHMS, NGRAM, NONE
from eagle_server.cache.block_events import block_size_of
from eagle_server.config import Config, ConfigError, SpeculativeSection
from eagle_server.engine.build.backends import caps_scores
from eagle_server.engine.build.devices import graph_memory, graph_sizes, load_kernels, memory_for_kv, resolve_backend
from eagle_server.engine.build.pools import bytes_per_slot
from eagle_server.engine.build.static_trees import TOKEN_TREE, read_choices
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.models.targets.interface import Target
from eagle_server.ops.native import available, threads
from eagle_server.speculation.accept import Acceptance, Lossless
from eagle_server.speculation.static_tree import Choices, depth_of, ranks_of, truncated
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.speculation.typical import Typical

logger = logging.getLogger(__name__)


def resolve(config: Config, target: Target, draft: DraftModel | None) -> EngineConfig:
    """The EngineConfig of `config` for these loaded models. `draft` is None if no draft model is loaded.

    Raises:
        ValueError: a value that cannot be served; the message says what to change.
    """
    device = target.embed.device
    models = [target.config]
    if draft is not None and draft.kv is not None:
        models.append(draft.kv)
    context = context_length(config, target.config)
    tree = _tree(config, target.config, draft)
    capped = caps_scores(target) or (draft is not None and caps_scores(draft))
    backend = resolve_backend(config, device, target.config, capped=capped)
    if backend == "flashinfer":
        load_kernels(device, *models)
    sizes = graph_sizes(config, backend, native=all(model.native for model in models))
    adaptive = config.speculates and config.speculative.adapts
    streams = 0 if draft is None else len(draft.aux_boundaries)
    graphs = graph_memory(sizes, tree, target.config, streams=streams, adaptive=adaptive)
    memory = memory_for_kv(config, device, graphs)
    fitting = memory // sum(map(bytes_per_slot, models))
    slots = config.cache.max_total_tokens or _slots_that_fit(config, context + tree.num_lookahead_slots, fitting)
    return EngineConfig(
        context_length=context,
        max_total_tokens=slots,
        tree=tree,
        page_size=config.cache.page_size,
        max_running_requests=config.scheduler.max_running_requests,
        chunked_prefill_size=config.scheduler.chunked_prefill_size,
        disable_radix_cache=config.cache.disable_radix_cache,
        algorithm=_algorithm(config, draft),
        backend=backend,
        graph_sizes=sizes,
        acceptance=_acceptance(config.speculative),
        estimating=config.speculates and config.speculative.acceptance == "lossless",
        adaptive=adaptive,
        coupling=config.speculative.couples,
    )


def context_length(config: Config, target: ModelConfig) -> int:
    """--context-length, or the target's own.

    Raises:
        ConfigError: more than the target's limit; the message has the reason and how to extend it.
    """
    wanted, (longest, reason) = config.model.context_length, target.context_limit
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"--context-length {wanted}: by config.json the model has at most {longest} ({reason}); "
            f"{_extension(target, wanted)}"
        )
    return wanted or target.max_position


def _extension(target: ModelConfig, wanted: int) -> str:
    """What to change in config.json for a longer context."""
    rope, original = target.rope, target.rope.original_max_position
    if original and rope.kind in ("linear", "dynamic", "yarn"):
        return f"a factor of {math.ceil(wanted / original)} in its RoPE parameters there allows more"
    if original and rope.kind == "default":
        return (
            f'for more, set rope_type "yarn", factor {math.ceil(wanted / original)} and '
            f"original_max_position_embeddings {original} in its rope_parameters (older files: rope_scaling) there"
        )
    return "a larger max_position_embeddings there allows more, if the model was trained for it"


def lookahead_bound(config: Config, target: ModelConfig) -> int:
    """Positions past the context that drafting may reach, whatever kind of draft the files turn out to hold.

    The RoPE tables are made when the models are loaded. The kind of draft, and so its tree, is known only after that.
    """
    if not config.speculates:
        return TreeConfig().num_lookahead_slots
    section = config.speculative
    window = dynamic_tree(section, target).num_lookahead_slots
    if section.token_tree is not None:
        return max(window, len(read_choices(section.token_tree, TOKEN_TREE)) + 1)
    kind = section.head_algorithm or section.algorithm
    for row in ALGORITHMS.values():
        if row.tree_option is not None and kind in (None, row.name):
            choices = read_choices(getattr(section, row.tree_option), row.tree_flag)
            window = max(window, len(choices) + 1, section.num_draft_tokens or 0)
    return window


def _tree(config: Config, target: ModelConfig, draft: DraftModel | None) -> TreeConfig:
    """The tree of the options that fit the draft; options for other kinds of drafts are refused."""
    if not config.speculates:
        return TreeConfig()
    section = config.speculative
    tree, choices = dynamic_tree(section, target), _static_choices(section, draft)
    if not choices:
        if not section.drafts_ngrams and section.num_draft_tokens not in (None, tree.num_draft_tokens):
            logger.warning(
                "--speculative-num-draft-tokens %d is adjusted to %d: with topk 1 the draft is a chain of %d and its "
                "root",
                section.num_draft_tokens,
                tree.num_draft_tokens,
                tree.num_steps,
            )
        return tree
    return TreeConfig(
        num_steps=depth_of(choices),
        topk=ranks_of(choices),
        num_draft_tokens=section.num_draft_tokens or len(choices) + 1,  # given only with n-grams
        choices=choices,
        ngram_depth=tree.ngram_depth,
        ngram_share_tokens=tree.ngram_share_tokens,
    )


def dynamic_tree(section: SpeculativeSection, target: ModelConfig) -> TreeConfig:
    """The tree of --speculative-num-steps, --topk and --speculative-num-draft-tokens, or the architecture's own."""
    options = section.tree_options(target.architecture)
    return TreeConfig(
        num_steps=options.num_steps,
        topk=options.eagle_topk,
        num_draft_tokens=options.num_draft_tokens,
        ngram_depth=options.ngram_depth,
        ngram_share_tokens=section.shared_tokens,
    )


def _static_choices(section: SpeculativeSection, draft: DraftModel | None) -> Choices:
    """The static tree that this draft drafts; () if its trees are dynamic."""
    drafts = None if draft is None else ALGORITHMS[draft.algorithm]
    for row in ALGORITHMS.values():
        if row is not drafts and row.tree_option is not None and getattr(section, row.tree_option) is not None:
            raise ConfigError(f"{row.tree_flag}: the draft's files hold no {row.holds}; drop it")
    if section.token_tree is None:
        return _own_choices(section, draft) if draft is not None else ()
    if drafts is None or drafts.static_drafter is None:
        found = "there is no draft" if drafts is None else f"the files hold a {drafts.name} draft"
        raise ConfigError(f"--speculative-token-tree is for EAGLE and MTP heads, but {found}; drop it")
    return read_choices(section.token_tree, TOKEN_TREE)


def _own_choices(section: SpeculativeSection, draft: DraftModel) -> Choices:
    """The tree of the draft's own option, if it has one. The default tree is cut to what the draft can draft."""
    row = ALGORITHMS[draft.algorithm]
    if row.tree_option is None or draft.max_steps is None:
        return ()
    if section.head_algorithm != row.name and section.shapes_tree:
        raise ConfigError(f"--speculative-num-steps, --topk: {row.trees_follow}; drop it")
    given = getattr(section, row.tree_option)
    choices = read_choices(given, row.tree_flag)
    if given is None:
        return truncated(choices, draft.max_steps)
    if depth_of(choices) > draft.max_steps:
        depth = depth_of(choices)
        raise ConfigError(f"{row.tree_flag}: a tree of depth {depth} needs as many heads, found {draft.max_steps}")
    return choices


def _acceptance(section: SpeculativeSection) -> Acceptance:
    if section.posterior is None:
        return Lossless()
    logger.warning(
        "--acceptance typical is LOSSY: texts of requests with temperature above 0 do not follow the target's "
        "distribution"
    )
    return Typical(*section.posterior)


def _algorithm(config: Config, draft: DraftModel | None) -> str:
    names = [draft.algorithm] if draft is not None else []
    return "+".join([*names, *([NGRAM] if config.speculative.drafts_ngrams else [])]) or NONE


def _slots_that_fit(config: Config, per_request: int, most: int) -> int:
    """Slots for every running request at full context, `most` at most, in whole pages."""
    slots = min(config.scheduler.max_running_requests * per_request, most)
    return slots // config.cache.page_size * config.cache.page_size


def server_info(config: Config, resolved: EngineConfig, target: Target) -> dict[str, Any]:
    """What /v1/server_info shows: the configuration with every automatic value in its place."""
    values = config.public_dict()
    values["model"].update(
        dtype=str(target.config.dtype).removeprefix("torch."),
        context_length=resolved.context_length,
        architecture=target.config.architecture,
        implementation="eagle_server" if target.config.native else "transformers",
    )
    values["device"].update(
        device=str(target.embed.device),
        attention_backend=resolved.backend,
        cuda_graph_batch_sizes=list(resolved.graph_sizes),
        cpu_threads=threads(),
        cpu_kernels="native" if available(target.embed.device, target.config.dtype) else "torch",
    )
    tree, speculative = resolved.tree, values["speculative"]
    speculative.update(algorithm=resolved.algorithm)
    if config.speculates:
        speculative.update(
            num_steps=tree.num_steps,
            eagle_topk=tree.topk,
            num_draft_tokens=tree.num_draft_tokens,
            ngram_depth=tree.ngram_depth,
            coupling="on" if resolved.coupling else "off",
        )
    if tree.choices:
        own = ALGORITHMS[resolved.algorithm.removesuffix(f"+{NGRAM}")].tree_option
        speculative[own or "token_tree"] = [list(node) for node in tree.choices]
    values["cache"].update(max_total_tokens=resolved.max_total_tokens, block_size=block_size_of(resolved.page_size))
    return values
