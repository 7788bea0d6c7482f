"""From loaded models and an EngineConfig to an engine: pools, backends, drafter, worker, scheduler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from eagle_server.algorithms import ALGORITHMS
from eagle_server.attention.batches import CAPTURED_PIECES
from eagle_server.cache.allocator import PageAllocator
from eagle_server.cache.block_events import BlockEvents, block_size_of
from eagle_server.cache.checkpoints import Checkpoints
from eagle_server.cache.manager import KVCacheManager
from eagle_server.cache.page_table import PageTable
from eagle_server.cache.pool import Pool
from eagle_server.cache.radix import RadixCache
from eagle_server.engine.assembly.backends import Backends
from eagle_server.engine.assembly.drafters import lookahead_slots, make_drafter
from eagle_server.engine.assembly.follow import send_setup
from eagle_server.engine.assembly.pools import make_pool, make_states
from eagle_server.engine.engine import Engine
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.models.ranks import RankGroup
from eagle_server.models.targets.interface import Target
from eagle_server.ops.device import has_streams, mirrors
from eagle_server.plan import TreeShape
from eagle_server.request import Ready
from eagle_server.scheduling.admission import SchedulerLimits
from eagle_server.scheduling.scheduler import Scheduler
from eagle_server.speculation.tree_config import fitting
from eagle_server.worker.batch.accepted_tokens import UNREAD_BYTES, UnreadPrompts
from eagle_server.worker.batch.batch import Batches
from eagle_server.worker.budget.budget import AdaptiveBudget, Budget, FixedBudget, Lessons
from eagle_server.worker.budget.cost_model import CostModel
from eagle_server.worker.budget.estimates import AcceptanceEstimates
from eagle_server.worker.budget.policy import POLICY, WITH_EVENTS
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.drafting import TreeDrafting
from eagle_server.worker.first_drafts import FirstDrafts
from eagle_server.worker.graphs import CudaRecorder, Graphs, Recorder, bucket_sizes
from eagle_server.worker.request_states import RequestStates
from eagle_server.worker.verifier import Verifier
from eagle_server.worker.warm_up import measure_costs, warm_up, warm_up_mixed
from eagle_server.worker.worker import Worker

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from eagle_server.engine.grammars.grammars import Grammars
    from eagle_server.engine.grammars.matcher import MaskBudget
    from eagle_server.engine.kv_events import KVEventPublisher

logger = logging.getLogger(__name__)

_LONG_TEXT = 4096  # tokens of the longest text whose cost is measured


@dataclass(frozen=True)
class Surroundings:
    """What an engine has beside its models and its numbers.

    document: the resolved configuration, for /v1/server_info.
    tokenizer: called when the first request with a grammar arrives; None: such requests are refused.
    mask_budget: limits the time of the grammars' token masks.
    ranks: they share the target. Those above 0 run `assemble_follower`.
    publisher: gets the events of the prefix cache.
    cores: entered for every cycle.
    flashinfer, recorder: stand-ins of tests for the library, and for the recorder of CUDA graphs.
    """

    document: Mapping[str, Any] | None = None
    tokenizer: Callable[[], Tokenizer] | None = None
    mask_budget: MaskBudget | None = None
    ranks: RankGroup | None = None
    publisher: KVEventPublisher | None = None
    cores: AbstractContextManager[None] = field(default_factory=nullcontext)
    flashinfer: Any = None
    recorder: Recorder | None = None


def assemble(
    target: Target, draft: DraftModel | None, config: EngineConfig, around: Surroundings | None = None
) -> Engine:
    """An engine over `target`. It drafts with `draft`, or with n-grams, or not at all, as `config.tree` says."""
    around = around or Surroundings()
    ranks = around.ranks
    device = target.embed.device
    row = None if draft is None else ALGORITHMS[draft.algorithm]
    config = replace(config, num_lookahead_slots=lookahead_slots(row, config.tree))
    _check(draft, config)
    backends = Backends(config, device, around.flashinfer)
    graphs = Graphs(around.recorder or _recorder(config, device))
    target_pool = make_pool(target.config, config.kv_slots, device)
    drafter, draft_pools = make_drafter(draft, config, backends, graphs, target_pool)
    pools = [target_pool, *draft_pools]
    states = _states(target, config)
    events = None if around.publisher is None else BlockEvents(config.page_size, block_size_of(config.page_size))
    if states is None or config.disable_radix_cache:
        config = replace(config, checkpoints=0, checkpoint_interval=0)
    if ranks is not None:
        send_setup(ranks, config)
    reads_late = drafter.reads_late and not (graphs.captures or mirrors(device))  # what runs ahead reads nothing
    unread = UnreadPrompts(config.kv_slots, config.page_size, UNREAD_BYTES if reads_late else 0)
    kv = _kv_cache(config, pools, device, events, unread, shared=ranks is not None)
    shapes = _shapes(config, drafter.widest)
    verified = {shape.nodes for shape in _all(shapes)}
    attention = backends.make(target, pools[0], verified, config.verify_attention)
    batches = Batches(
        kv.table,
        vocab_size=target.config.vocab_size,
        steps=config.tree.steps,
        sizes=config.graph_sizes,
        coupling=config.coupling,
        estimates=AcceptanceEstimates(device) if config.estimating or config.adaptive else None,
        ranks=ranks,
        unread=unread,
    )
    fixed = {} if attention.ragged_trees else shapes
    drafting = _drafting(config, draft, drafter, batches, fixed)
    captured = max((size * shape.nodes for size in config.graph_sizes for shape in shapes[size]), default=0)
    boundaries = () if draft is None else draft.aux_boundaries
    verifier = Verifier(target, attention, pools[0], graphs, ranks, captured, states, boundaries)
    worker = Worker(verifier, drafting, batches, config.acceptance, overlaps=graphs.captures)
    if config.graph_sizes:
        _capture(worker, graphs, backends, config, shapes)
    elif mirrors(device):
        _compile(worker, config, fixed)
    if isinstance(drafting.budget, AdaptiveBudget):
        _measure(worker, drafting.budget.costs, config, fixed)
    scheduler = Scheduler(_limits(config, uses_features=drafter.uses_features), kv)
    grammars = _grammars(around, target.config)
    return Engine(
        scheduler, worker, _ready(config, target, kv, around.document), grammars, around.publisher, around.cores
    )


Shapes = Mapping[int, Sequence[TreeShape]]  # of trees in cycles of so many requests; empty: any


def _shapes(config: EngineConfig, widest: int) -> Shapes:
    """What cycles may draft, by the sizes of batches, if all trees of a cycle have one shape."""
    sizes, tree = config.graph_sizes or bucket_sizes(config.max_running_requests), config.tree
    return {size: tree.captured_shapes(size, widest, adaptive=config.adaptive) for size in sizes}


def _drafting(
    config: EngineConfig, draft: DraftModel | None, drafter: Drafter[Any], batches: Batches, shapes: Shapes
) -> TreeDrafting:
    """The drafter under its budget."""
    tree, estimates = config.tree, batches.estimates
    first_drafts = None if draft is None else FirstDrafts(ALGORITHMS[draft.algorithm].silent_causes)
    policy = WITH_EVENTS if has_streams(batches.device) else POLICY
    budget: Budget = FixedBudget(tree.model_steps, tree.nodes, estimates=estimates, lessons=Lessons(policy))
    if config.adaptive:
        assert estimates is not None
        trees = {size: each[:-1] for size, each in shapes.items()}  # but no tree
        sizes = (batches.pad_row + 1, (tree.steps, tree.nodes))
        budget = AdaptiveBudget(
            *sizes, CostModel(policy), estimates, drafter.forwards, drafter.widest, trees, first_drafts=first_drafts
        )
    return TreeDrafting(drafter, batches, budget, first_drafts=first_drafts)


def _measure(worker: Worker, costs: CostModel, config: EngineConfig, shapes: Shapes) -> None:
    """Measure what cycles cost, before the budget weighs it."""
    began, tree = time.perf_counter(), config.tree
    longest = min(config.context_length, config.max_total_tokens, _LONG_TEXT)
    largest = TreeShape(tree.model_steps, tree.nodes)
    fed, others = worker.drafter.forwards(largest)[1], (largest._replace(topk=1), largest._replace(steps=1))
    narrow = [shape for shape in others if worker.drafter.forwards(shape)[1] < fed]
    trees = {size: list(dict.fromkeys((each[0], each[-2]))) for size, each in shapes.items()} or {1: [largest, *narrow]}
    measure_costs(worker, costs, trees, config.max_running_requests, longest)
    logger.info(
        "costs measured in %.1f s: %.1f ms for one row, %.1f ms for %d",
        time.perf_counter() - began,
        1e3 * costs.verify.at(1.0),
        1e3 * costs.verify.at(float(tree.nodes)),
        tree.nodes,
    )


def _check(draft: DraftModel | None, config: EngineConfig) -> None:
    """Refuse numbers with which no request could be served."""
    usable, tree = config.max_total_tokens // config.page_size * config.page_size, config.tree
    if usable < config.num_lookahead_slots + 2:
        raise ValueError(
            f"--max-total-tokens {config.max_total_tokens}: {usable} slots in pages of {config.page_size} hold no "
            f"request; drafting and verifying alone need {config.num_lookahead_slots}"
        )
    if draft is not None and tree.topk > draft.draft_vocab_size:
        raise ValueError(f"--speculative-eagle-topk {tree.topk}: the head drafts from {draft.draft_vocab_size} tokens")


def _states(target: Target, config: EngineConfig) -> RequestStates | None:
    """The states of the target's recurrent layers; None if it has no such layers."""
    checkpoints = 0 if config.disable_radix_cache else config.checkpoints
    sizes = (config.max_running_requests, config.tree.nodes)
    pool = make_states(target.config, *sizes, target.embed.device, checkpoints)
    if config.poison and pool is not None:
        pool.poison()
    return None if pool is None else RequestStates(pool)


def _recorder(config: EngineConfig, device: torch.device) -> Recorder | None:
    return CudaRecorder() if config.graph_sizes and device.type == "cuda" else None


def _kv_cache(
    config: EngineConfig,
    pools: Sequence[Pool],
    device: torch.device,
    events: BlockEvents | None,
    unread: UnreadPrompts,
    *,
    shared: bool,
) -> KVCacheManager:
    """The KV cache, all pages free. With `poison`, free pages hold values that no result may depend on."""
    allocator = PageAllocator(config.max_total_tokens // config.page_size, config.page_size)
    width = config.context_length + config.num_lookahead_slots
    table = PageTable(config.max_running_requests, width, config.page_size, device, shared=shared)

    def poison(pages: list[int]) -> None:
        unread.freed(pages)
        first = torch.tensor(pages)[:, None] * config.page_size
        for pool in pools:
            pool.poison((first + torch.arange(config.page_size)).view(-1).to(device))

    if config.poison:
        poison(list(range(1, allocator.num_pages + 1)))
    first = table.pad_row + 1  # row of the state pool
    checkpoints = Checkpoints(range(first, first + config.checkpoints)) if config.checkpoint_interval else None
    radix = None if config.disable_radix_cache else RadixCache(config.page_size, events, checkpoints)
    return KVCacheManager(allocator, table, radix, poison if config.poison else unread.freed)


def _capture(worker: Worker, graphs: Graphs, backends: Backends, config: EngineConfig, shapes: Shapes) -> None:
    """Size the workspace, then capture every graph that serving will use."""
    lengths = (2, config.context_length)  # attention to trees may be computed differently over long texts
    with graphs.paused():
        # The largest batch too: it may be larger than the graphs, and the workspace cannot grow after the capture.
        every = sorted({*config.graph_sizes, config.max_running_requests})
        largest = {size: fitting(shapes, size)[0] for size in every}
        for shape in dict.fromkeys(largest.values()):
            warm_up(worker, shape, [size for size in every if largest[size] == shape], lengths)
        for pieces in CAPTURED_PIECES:  # their graphs are captured later, where the server has nothing else to do
            warm_up_mixed(worker, TreeShape(0, 1), every[0], lengths[0], pieces)
    backends.freeze()
    captured = {shape: [size for size in config.graph_sizes[::-1] if shape in shapes[size]] for shape in _all(shapes)}
    with tqdm(total=sum(map(len, captured.values())), desc="capture graphs", unit="batch", disable=None) as bar:
        for shape, sizes in captured.items():
            warm_up(worker, shape, sizes, lengths)
            bar.update(len(sizes))


def _all(shapes: Shapes) -> list[TreeShape]:
    return list(dict.fromkeys(shape for each in shapes.values() for shape in each))


def _compile(worker: Worker, config: EngineConfig, allowed: Shapes) -> None:
    """Without graphs: launch every kernel that serving will launch, so that no request waits for a compiler.

    With several ranks all of them compute these cycles, so that their communication has begun.
    """
    tree, sizes = config.tree, sorted({1, min(2, config.max_running_requests), config.max_running_requests})
    shapes = {*_all(allowed), TreeShape(tree.model_steps, tree.nodes), TreeShape(0, 1)}
    shapes |= {TreeShape(steps, tree.nodes) for steps in range(1, tree.steps)}  # near a request's end
    lengths: tuple[int, ...] = (2,)
    if not worker.verifier.attention.ragged_trees:
        lengths = (2, config.context_length)  # as in `_capture`
    else:  # trees of any size, because they are cut, and kernels are compiled for powers of two
        shapes |= {TreeShape(tree.steps, 1 << power) for power in range(1, tree.nodes.bit_length())}
        shapes |= {TreeShape(steps, 2) for steps in range(1, tree.steps)}
    for shape in tqdm(sorted(shapes, reverse=True), desc="compile kernels", unit="tree", disable=None):
        warm_up(worker, shape, sizes, lengths)
    if config.max_running_requests > 1:
        warm_up_mixed(worker, max(shapes), 1, lengths[0], CAPTURED_PIECES[0])


def _limits(config: EngineConfig, *, uses_features: bool) -> SchedulerLimits:
    return SchedulerLimits(
        context_length=config.context_length,
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=config.chunked_prefill_size,
        num_lookahead_slots=config.num_lookahead_slots,
        steps=config.tree.steps,
        uses_features=uses_features,
        lossy=config.acceptance.lossy,
        checkpoint_interval=config.checkpoint_interval,
    )


def _ready(config: EngineConfig, target: Target, kv: KVCacheManager, document: Mapping[str, Any] | None) -> Ready:
    """The message in which the engine tells the API process about itself."""
    most = kv.allocator.num_pages * config.page_size - config.num_lookahead_slots
    return Ready(
        context_length=config.context_length,
        max_request_tokens=min(config.context_length, most),
        vocab_size=target.config.vocab_size,
        eos_token_ids=target.config.eos_token_ids,
        media_token_ids=target.config.media_token_ids,
        speculative_algorithm=config.algorithm,
        num_steps=config.tree.steps,
        resolved=dict(document or {}),
        pid=os.getpid(),
    )


def _grammars(around: Surroundings, config: ModelConfig) -> Grammars | None:
    """None for a model without an end-of-sequence token: a grammar could not end its text."""
    ends = [token for token in config.eos_token_ids if 0 <= token < config.vocab_size]
    if around.tokenizer is None or not ends:
        return None
    # Imported here because only engines with a tokenizer need llguidance and tokenizers.
    from eagle_server.engine.grammars.grammars import Grammars

    return Grammars(around.tokenizer, config.vocab_size, ends, around.mask_budget)
