"""The readers and proposers of heads with pairs: EAGLE-1/2/3 and MTP."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from eagle_server.attention.spec_info import EagleDraftInput
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.speculation.static_tree import static_tree
from eagle_server.speculation.tree_config import TreeConfig, extend_widths
from eagle_server.worker.drafters.interface import DrafterSetup, ModelDrafter
from eagle_server.worker.drafters.multi_step import MultiStep, NativeMultiStep
from eagle_server.worker.drafters.pairs import NativePairReader, PairReader
from eagle_server.worker.drafters.static_levels import StaticLevels


def lookahead(tree: TreeConfig) -> int:
    """KV slots after a request's text: the rows of draft-extend, and behind them the nodes that draft steps feed.

    Both may run before the slots of the newest tokens are allocated. A static tree's nodes are fed later, and are no
    more than the target verifies.
    """
    extended = tree.steps + 1
    return extended if tree.choices else extended + (tree.model_steps - 1) * tree.topk


def eagle_drafter(head: DraftHead, setup: DrafterSetup) -> ModelDrafter[EagleDraftInput]:
    """Trees that grow by scores."""
    reader = pair_reader(head, setup, MultiStep.step_rows(setup.tree))
    return ModelDrafter(reader, multi_step(reader, setup))


def static_eagle_drafter(head: DraftHead, setup: DrafterSetup) -> ModelDrafter[EagleDraftInput]:
    """A static tree."""
    tree = static_tree(setup.tree.choices, setup.device)
    setup = replace(setup, tree=replace(setup.tree, topk=tree.topk))
    reader = pair_reader(head, setup, tree.rows)
    return ModelDrafter(reader, StaticLevels(reader, tree, setup.graphs))


def pair_reader(head: DraftHead, setup: DrafterSetup, step_rows: Collection[int]) -> PairReader:
    """By native kernels where they compute this head. step_rows: rows per request of the forwards that propose."""
    attention = setup.attention({*extend_widths(setup.tree.steps), *step_rows})
    weights, caches = head.native_weights(), attention.native_caches
    if weights is None or caches is None:
        return PairReader(head, attention, setup)
    return NativePairReader(head, attention, setup, weights, caches)


def multi_step(reader: PairReader, setup: DrafterSetup) -> MultiStep:
    """By native kernels if the reader uses them."""
    return NativeMultiStep(reader, setup) if isinstance(reader, NativePairReader) else MultiStep(reader, setup)
