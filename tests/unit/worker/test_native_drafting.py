"""Draft-extend and all draft steps in one native call each, against the loop that runs the head level by level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.engine.engine import Engine
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.drafts.interface import DraftHead, TargetWeights
from eagle_server.models.drafts.mtp import MtpConfig, MtpHead
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.layers import pack_linears
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.native.library import available
from eagle_server.worker.budget.budget import FixedBudget
from eagle_server.worker.cycle import Cycle
from eagle_server.worker.drafters.multi_step import NativeMultiStep
from eagle_server.worker.drafters.pairs import NativePairReader
from tests.support.engines import CONTEXT, MARGIN, random_head, random_target, randomized, request, run, speculative

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)

FLAGS: dict[str, dict[str, Any]] = {
    "normed residual": {"norm_before_residual": True},
    "normed feedback": {"norm_output": True, "draft_vocab_size": 30, "vocab_map": True},
    "no fc": {"aux_boundaries": ()},
    "own embedding": {"own_embed": True, "fc_bias": True},
}


def head_of(name: str, target: TargetModel) -> DraftHead:
    config = target.config
    one, borrowed = replace(config, num_layers=1), TargetWeights(target.embed, target.lm_head)
    if name in FLAGS:
        common = {"target_hidden_size": config.hidden_size, "draft_vocab_size": config.vocab_size}
        flags = {"aux_boundaries": (1, 2, 3), **common, **FLAGS[name]}
        head = randomized(Eagle3Head(Eagle3Config(layers=one, **flags), CONTEXT + MARGIN, borrowed), 1, 0.25)
        if head.d2t is not None:
            head.set_vocabulary(torch.arange(4, 34))
    elif name == "MTP":
        head = randomized(MtpHead(MtpConfig(one, config.num_layers), CONTEXT + MARGIN, borrowed), 1, 0.25)
    elif name == "STANDALONE":
        head = DraftLM(random_target(hidden=64, layers=2, seed=7, head_dim=config.head_dim))
    elif name == "STANDALONE Gemma 3":
        family = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 2}
        head = DraftLM(random_target(hidden=64, layers=2, seed=7, head_dim=config.head_dim, **family))
    else:
        head = random_head(target, name, draft_vocab=30 if name == "EAGLE" else None)
    pack_linears(head)
    return head


HEADS = [*FLAGS, "EAGLE", "EAGLE3", "MTP", "STANDALONE", "STANDALONE Gemma 3"]


def trees_of(engine: Engine, temperature: float) -> list[tuple[Tensor, ...]]:
    """Every tree that the engine verifies, without its text."""
    found: list[tuple[Tensor, ...]] = []

    def observe(cycle: Cycle) -> None:
        tree = cycle.tree
        if tree.size == 1:
            return  # a request's last token needs no draft
        assert tree.scores is not None
        found.append((tree.tokens, tree.parents, tree.scores))

    engine.worker.observers.append(observe)
    prompts = torch.randint(1, 48, (3, 30), generator=torch.Generator().manual_seed(2)).tolist()
    kinds = (temperature, 0.0, 1.3 * temperature)
    run(
        engine,
        [
            request(i, prompts[i][: 8 + 9 * i], max_tokens=14, seed=i, temperature=t, ignore_eos=True)
            for i, t in enumerate(kinds)
        ],
    )
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("steps", "topk", "dim", "width"), [(1, 3, 16, 0), (2, 1, 18, 0), (4, 3, 16, 0), (4, 3, 18, 0), (4, 3, 16, 2)]
)
@pytest.mark.parametrize("name", HEADS)
def test_the_native_calls_draft_the_trees_of_the_loop(
    name: str, steps: int, topk: int, dim: int, width: int, temperature: float
) -> None:
    target = random_target(hidden=64, head_dim=dim)
    pack_linears(target)
    trees = []
    for native in (True, False):
        kind = {"algorithm": "STANDALONE"} if name.startswith("STANDALONE") else {}
        head: Any = head_of(name, target)
        if not native:
            head.native_weights = lambda: None
        engine = speculative(target, head, steps, topk, page_size=4, **kind)
        drafter: Any = engine.worker.drafter
        reader, proposer = getattr(drafter.reader, "pairs", drafter.reader), drafter.proposer
        by_native = (
            isinstance(reader, NativePairReader),
            isinstance(getattr(proposer, "multi_step", proposer), NativeMultiStep),
        )
        assert by_native == (native, native)
        fixed = engine.worker.drafting.budget
        assert isinstance(fixed, FixedBudget)
        engine.worker.drafting.budget = replace(fixed, topk=width)  # nodes that each draft step feeds
        trees.append(trees_of(engine, temperature))
    assert len(trees[0]) == len(trees[1]) > 5
    for mine, theirs in zip(*trees, strict=True):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
        torch.testing.assert_close(mine[2], theirs[2], atol=2e-3, rtol=1e-3)
