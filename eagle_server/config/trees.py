"""The shape of draft trees: what is given completed and checked, what is not chosen by architecture."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_server.config.base import ConfigError

NGRAM_DEPTH = 8  # longer guesses are seldom right to their end


@dataclass(frozen=True)
class SpeculativeParams:
    """The shape of draft trees: depth, children per node (0: any), and nodes verified at once (root included)."""

    num_steps: int
    eagle_topk: int
    num_draft_tokens: int
    ngram_depth: int = 0  # of n-gram tries, 0: there are none


# SGLang's choice: a tree of 8, but a short chain for targets whose own MTP layer drafts. A draft model's forwards cost
# more than a head's.
_SHORT = SpeculativeParams(3, 1, 4)
_AUTO = {"DeepseekV2ForCausalLM": _SHORT, "DeepseekV3ForCausalLM": _SHORT, "STANDALONE": _SHORT}
_AUTO_OTHERWISE = SpeculativeParams(5, 4, 8)  # Llama, Grok and all others


def automatic(architecture: str, *, ngrams: bool) -> SpeculativeParams:
    """The tree for a target of this architecture (`architectures[0]`), with room for `ngrams` beside a short chain.

    "STANDALONE" in its place: for a draft model.
    """
    params = _AUTO.get(architecture, _AUTO_OTHERWISE)
    if not ngrams:
        return params
    return joined(params.num_steps, params.eagle_topk, max(params.num_draft_tokens, _AUTO_OTHERWISE.num_draft_tokens))


def joined(steps: int, topk: int, nodes: int) -> SpeculativeParams:
    """A head's tree and tries: any number of nodes, as the tries fill what the head leaves free."""
    refuse_root_alone(nodes)
    return SpeculativeParams(steps, topk, nodes, ngram_depth=NGRAM_DEPTH)


def tries(steps: int | None, nodes: int | None) -> SpeculativeParams:
    """Tries without a head: 8 deep and 16 nodes, if nothing else is given."""
    steps, nodes = steps or NGRAM_DEPTH, nodes or 2 * NGRAM_DEPTH
    refuse_root_alone(nodes)
    return SpeculativeParams(steps, 0, nodes, ngram_depth=steps)


def head_tree(steps: int, topk: int, nodes: int | None) -> SpeculativeParams:
    """A head's tree without tries: at most its whole pool."""
    if topk == 1:
        return SpeculativeParams(steps, 1, steps + 1)
    # The first level has topk candidates; each of topk frontier nodes of every further level adds topk children.
    pool = topk + (steps - 1) * topk * topk
    nodes = steps * topk + 1 if nodes is None else nodes
    if not 1 < nodes <= pool + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {nodes}: should be from 2 to {pool + 1}: {steps} steps with topk {topk} "
            f"give {topk} + {steps - 1} * {topk} * {topk} = {pool} candidates, and the root"
        )
    return SpeculativeParams(steps, topk, nodes)


def refuse_root_alone(nodes: int | None) -> None:
    if nodes == 1:
        raise ConfigError("--speculative-num-draft-tokens 1: should be 2 or more: the root is one of them")
