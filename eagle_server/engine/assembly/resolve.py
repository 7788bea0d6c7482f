"""From options and loaded models to an EngineConfig: every automatic size gets its number here."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from eagle_server.algorithms import ALGORITHMS, NGRAM, NONE, STATIC_TREE_OPTIONS, StaticTreeOption
from eagle_server.cache.block_events import block_size_of
from eagle_server.config import Config, ConfigError, SpeculativeSection
from eagle_server.engine.assembly.backends import caps_scores
from eagle_server.engine.assembly.devices import (
    graph_memory,
    graph_sizes,
    load_kernels,
    memory_for_kv,
    resolve_backend,
    rounding_of_draft,
)
from eagle_server.engine.assembly.drafters import lookahead_slots
from eagle_server.engine.assembly.pools import CheckpointPlan, bytes_per_slot, state_bytes
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.models.config import CHUNK_LIMIT, ModelConfig
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.models.targets.interface import Target
from eagle_server.ops.native.library import available, threads
from eagle_server.speculation.accept import Acceptance, Lossless
from eagle_server.speculation.static_tree import Choices, ranks_of, read_choices, steps_of, truncated
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
    sizes = graph_sizes(config, backend, *models)
    adaptive = config.speculates and config.speculative.adapts
    streams = 0 if draft is None else len(draft.aux_boundaries)
    graphs = graph_memory(sizes, tree, target.config, streams=streams, adaptive=adaptive)
    states = state_bytes(target.config, config.scheduler.max_running_requests, tree.nodes)
    slot = sum(map(bytes_per_slot, models))
    saving = checkpoint_plan(config, target.config, slot)
    states += 0 if saving is None else saving.least
    memory = _beside_states(config, memory_for_kv(config, device, graphs), states)
    fitting = memory // slot if saving is None else saving.slots_that_fit(memory, slot)
    window = lookahead_slots(None if draft is None else ALGORITHMS[draft.algorithm], tree)
    slots = config.cache.max_total_tokens or _slots_that_fit(config, context + window, fitting)
    return EngineConfig(
        context_length=context,
        max_total_tokens=slots,
        tree=tree,
        page_size=config.cache.page_size,
        max_running_requests=config.scheduler.max_running_requests,
        chunked_prefill_size=config.scheduler.chunked_prefill_size,
        disable_radix_cache=config.cache.disable_radix_cache,
        checkpoints=0 if saving is None else saving.count(slots),
        checkpoint_interval=0 if saving is None else saving.interval,
        algorithm=_algorithm(config, draft),
        backend=backend,
        graph_sizes=sizes,
        acceptance=_acceptance(config.speculative),
        estimating=config.speculates and config.speculative.acceptance == "lossless",
        adaptive=adaptive,
        coupling=config.speculative.couples,
    )


def checkpoint_plan(config: Config, target: ModelConfig, slot_bytes: int) -> CheckpointPlan | None:
    """The checkpoints of the target's states; None: it has none, or nothing is cached."""
    if config.cache.disable_radix_cache:
        return None
    return CheckpointPlan.of(target, slot_bytes, config.scheduler.chunked_prefill_size, config.cache.page_size)


def _beside_states(config: Config, memory: int, states: int) -> int:
    """Bytes that are left for KV beside the states of recurrent layers.

    Raises:
        ConfigError: the states of all running requests take everything.
    """
    if states and states >= memory:
        running = config.scheduler.max_running_requests
        raise ConfigError(
            f"--max-running-requests {running}: the states of the recurrent layers of {running} requests take "
            f"{states / 2**30:.1f} GiB, and there are {memory / 2**30:.1f} GiB for states and KV; give a smaller number"
        )
    return memory - states


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
    """A hint what to change in config.json for a longer context."""
    rope, original = target.rope, target.rope.original_max_position
    if target.context_limit[1] == CHUNK_LIMIT:
        return f"add --context-length {target.context_limit[0]}, or drop it"
    if original and rope.kind in ("linear", "dynamic", "yarn"):
        return f"a factor of {math.ceil(wanted / original)} in its RoPE parameters there allows more"
    if original and rope.kind == "default":
        return (
            f'for more, set rope_type "yarn", factor {math.ceil(wanted / original)} and '
            f"original_max_position_embeddings {original} in its rope_parameters (older files: rope_scaling) there"
        )
    return "a larger max_position_embeddings there allows more, if the model was trained for it"


def lookahead_bound(config: Config, target: ModelConfig) -> int:
    """Positions past the context that drafting may reach, whatever kind of draft the files hold.

    The RoPE tables are made when the models are loaded. The kind of draft, and so its tree, is known only after that.
    """
    if not config.speculates:
        return lookahead_slots(None, TreeConfig())
    section = config.speculative
    trees = [dynamic_tree(section, target)]
    for option in section.static_trees:
        if choices := _listed(section, option):
            nodes = max(len(choices) + 1, section.num_draft_tokens or 0)
            trees.append(TreeConfig(steps_of(choices), nodes=nodes, choices=choices))
    return max(lookahead_slots(row, tree) for row in ALGORITHMS.values() for tree in trees)


def _tree(config: Config, target: ModelConfig, draft: DraftModel | None) -> TreeConfig:
    """The tree of the options that fit the draft; options for other kinds of drafts are refused."""
    if not config.speculates:
        return TreeConfig()
    section = config.speculative
    tree, choices = dynamic_tree(section, target), _static_choices(section, draft)
    if not choices:
        if not section.drafts_ngrams and section.num_draft_tokens not in (None, tree.nodes):
            logger.warning(
                "--speculative-num-draft-tokens %d is adjusted to %d: with topk 1 the draft is a chain of %d and its "
                "root",
                section.num_draft_tokens,
                tree.nodes,
                tree.model_steps,
            )
        return _within_block(tree, section, draft)
    return TreeConfig(
        model_steps=steps_of(choices),
        topk=ranks_of(choices),
        nodes=section.num_draft_tokens or len(choices) + 1,  # given only with n-grams
        choices=choices,
        ngram_steps=tree.ngram_steps,
    )


def _within_block(tree: TreeConfig, section: SpeculativeSection, draft: DraftModel | None) -> TreeConfig:
    """The tree, cut to the levels that the draft can draft. More given steps than that are refused."""
    most = None if draft is None else draft.max_steps
    if most is None or tree.model_steps <= most:
        return tree
    if section.num_steps is not None:
        raise ConfigError(f"--speculative-num-steps {section.num_steps}: one pass of this draft scores {most} tokens")
    cut = replace(tree, model_steps=most)
    if tree.ngram_steps:
        return cut
    nodes = most + 1 if tree.topk == 1 else min(tree.nodes, tree.topk + (most - 1) * tree.topk**2 + 1)
    return replace(cut, nodes=nodes)


def dynamic_tree(section: SpeculativeSection, target: ModelConfig) -> TreeConfig:
    """The tree of --speculative-num-steps, --topk and --speculative-num-draft-tokens, or the architecture's own."""
    options = section.tree_options(target.architecture)
    return TreeConfig(
        model_steps=options.num_steps,
        topk=options.eagle_topk,
        nodes=options.num_draft_tokens,
        ngram_steps=options.ngram_depth,
    )


def _static_choices(section: SpeculativeSection, draft: DraftModel | None) -> Choices:
    """The static tree that this draft drafts; () if its trees grow. A default tree is cut to the draft's depth."""
    row = None if draft is None else ALGORITHMS[draft.algorithm]
    own = None if row is None else row.static_tree
    for option in STATIC_TREE_OPTIONS:
        if option != own and section.lists(option):
            held = "there is no draft" if row is None else f"the draft's files hold {row.holds}"
            raise ConfigError(f"{option.flag} is for {option.takers}, but {held}; drop it")
    if draft is None or row is None or own is None or not (choices := _listed(section, own)):
        return ()
    if section.head_algorithm != row.name and section.shapes_tree:
        raise ConfigError(f"--speculative-num-steps, --topk: {row.trees_follow}; drop it")
    if draft.max_steps is None or steps_of(choices) <= draft.max_steps:
        return choices
    if section.lists(own):
        steps = steps_of(choices)
        raise ConfigError(f"{own.flag}: a tree of depth {steps} needs as many heads, found {draft.max_steps}")
    return truncated(choices, draft.max_steps)


def _listed(section: SpeculativeSection, option: StaticTreeOption) -> Choices:
    """The tree of the option, or its default; () if there is none."""
    nodes = getattr(section, option.field) or option.default
    return () if nodes is None else read_choices(nodes, option.flag)


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
    """The configuration with all automatic values, for /v1/server_info."""
    values = config.public_dict()
    values["model"].update(
        dtype=str(target.config.dtype).removeprefix("torch."),
        context_length=resolved.context_length,
        architecture=target.config.architecture,
        implementation="eagle_server" if target.config.has_family else "transformers",
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
    if config.draft_path is not None:
        rounding = rounding_of_draft(config, target.embed.device, target.config.dtype)
        speculative.update(draft_quantization=rounding or "none")
    if config.speculates:
        speculative.update(
            has_rows=resolved.algorithm in ALGORITHMS and ALGORITHMS[resolved.algorithm].has_rows,
            num_steps=tree.model_steps,
            eagle_topk=tree.topk,
            num_draft_tokens=tree.nodes,
            ngram_depth=tree.ngram_steps,
            coupling="on" if resolved.coupling else "off",
        )
    if tree.choices:
        option = ALGORITHMS[resolved.algorithm.removesuffix(f"+{NGRAM}")].static_tree
        assert option is not None, "it gave the tree"
        speculative[option.field] = [list(node) for node in tree.choices]
    values["cache"].update(
        max_total_tokens=resolved.max_total_tokens,
        block_size=block_size_of(resolved.page_size),
        disable_radix_cache=resolved.disable_radix_cache,
    )
    if resolved.checkpoints:
        values["cache"].update(
            state_checkpoints=resolved.checkpoints, state_checkpoint_interval=resolved.checkpoint_interval
        )
    return values
