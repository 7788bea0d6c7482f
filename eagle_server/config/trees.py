"""The options that shape draft trees: given ones are completed and checked, others are chosen by architecture."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_server.algorithms import DEEPEST_TREE
from eagle_server.config.base import ConfigError

NGRAM_STEPS = 8  # longer n-gram drafts are seldom accepted to their end


@dataclass(frozen=True)
class TreeOptions:
    """The options that shape draft trees, by the names of their flags and of `/v1/server_info`; all have values."""

    num_steps: int  # of the tree
    eagle_topk: int  # children per node; 0: any number, for n-gram tries
    num_draft_tokens: int  # nodes that the target verifies at once, root included
    ngram_depth: int = 0  # of n-gram tries; 0: no n-grams

    def __post_init__(self) -> None:
        if self.num_steps > DEEPEST_TREE:
            raise ConfigError(f"--speculative-num-steps {self.num_steps}: trees have at most {DEEPEST_TREE} levels")


# SGLang's choice: a tree of 8 nodes, but a short chain for targets with an MTP layer. A draft language model gets the
# short chain too, because its forwards cost more than a head's.
_SHORT = TreeOptions(3, 1, 4)
_AUTO = {"DeepseekV2ForCausalLM": _SHORT, "DeepseekV3ForCausalLM": _SHORT}
_AUTO_OTHERWISE = TreeOptions(5, 4, 8)  # Llama, Grok and all others


def automatic(architecture: str, *, is_model: bool = False, ngrams: bool = False) -> TreeOptions:
    """The tree for a target of this architecture (`architectures[0]`).

    `is_model`: a language model drafts. `ngrams`: a short chain gets more nodes, so that tries have room beside it.
    """
    options = _SHORT if is_model else _AUTO.get(architecture, _AUTO_OTHERWISE)
    if not ngrams:
        return options
    nodes = max(options.num_draft_tokens, _AUTO_OTHERWISE.num_draft_tokens)
    return mixture(options.num_steps, options.eagle_topk, nodes)


def completed(base: TreeOptions, steps: int | None, topk: int | None, nodes: int | None) -> TreeOptions:
    """The tree of the given values. The others follow from these, or come from `base`, an automatic tree.

    Raises:
        ConfigError: no tree has the given values together.
    """
    refuse_root_alone(nodes)
    given_steps, steps = steps, steps or base.num_steps
    if base.ngram_depth:
        topk = topk or base.eagle_topk
        return mixture(steps, topk, nodes or max(base.num_draft_tokens, steps * topk + 1))
    if topk is None:
        fits_a_chain = nodes is None or nodes <= (given_steps or DEEPEST_TREE) + 1
        topk = 1 if base.eagle_topk == 1 and fits_a_chain else _AUTO_OTHERWISE.eagle_topk
    if given_steps is None and nodes is not None:
        steps = nodes - 1 if topk == 1 else min(steps, nodes - 1)
        while _pool(steps, topk) < nodes - 1:
            steps += 1
    return head_tree(steps, topk, nodes)


def mixture(steps: int, topk: int, nodes: int) -> TreeOptions:
    """A head's tree and tries together. Any number of nodes is valid: the tries fill what the head leaves free."""
    refuse_root_alone(nodes)
    return TreeOptions(steps, topk, nodes, ngram_depth=NGRAM_STEPS)


def tries(steps: int | None, nodes: int | None) -> TreeOptions:
    """N-gram tries alone: 8 steps and 16 nodes by default."""
    steps, nodes = steps or NGRAM_STEPS, nodes or 2 * NGRAM_STEPS
    refuse_root_alone(nodes)
    return TreeOptions(steps, 0, nodes, ngram_depth=steps)


def head_tree(steps: int, topk: int, nodes: int | None) -> TreeOptions:
    """A head's tree alone. It has at most as many nodes as the head scores candidates, and the root."""
    if topk == 1:
        return TreeOptions(steps, 1, steps + 1)
    pool = _pool(steps, topk)
    nodes = steps * topk + 1 if nodes is None else nodes
    if not 1 < nodes <= pool + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {nodes}: should be from 2 to {pool + 1}: {steps} steps with topk "
            f"{topk} give {topk} + {steps - 1} * {topk} * {topk} = {pool} candidates, and the root"
        )
    return TreeOptions(steps, topk, nodes)


def _pool(steps: int, topk: int) -> int:
    """Candidates that a head scores: topk on the first level, topk children of each of topk nodes on further levels."""
    return topk + (steps - 1) * topk * topk


def refuse_root_alone(nodes: int | None) -> None:
    """Refuse a tree without drafted nodes.

    Raises:
        ConfigError: the root would be the only node.
    """
    if nodes == 1:
        raise ConfigError("--speculative-num-draft-tokens 1: should be 2 or more: the root is one of them")
