"""The ranking of drafted children: grammar, then parameters, then the noise with which the target will draw."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_server.cache.page_table import PageTable
from eagle_server.ops.captured import TensorReader, builder
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.ops.sampling.topk import topk_logprobs
from eagle_server.plan import MASK_WORD, CyclePlan, Decode
from eagle_server.speculation.random import request_key
from eagle_server.speculation.sampling import draw
from eagle_server.speculation.tree import build_tree
from eagle_server.worker.batch.batch import Batches, DecodeBatch
from eagle_server.worker.batch.draft_ranking import DraftRanking
from eagle_server.worker.budget.budget import CycleBudget
from tests.support.sampling import request_sampling

VOCAB, STEPS, NODES = 90, 3, 2
CPU = torch.device("cpu")
VOCABULARY = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:40]  # target ids of 40 draft tokens
OTHERS = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, VOCABULARY, value=False)


def batch_of(*settings: dict[str, Any], sizes: tuple[int, ...] = (), coupling: bool = True, **own: Any) -> DecodeBatch:
    """A cycle's batch of requests with these parameters, each with a text of its own length. `own` are of Decode."""
    table = PageTable(8, 64, 1)
    batches = Batches(table, vocab_size=VOCAB, steps=STEPS, sizes=sizes, coupling=coupling)
    decodes = tuple(
        Decode(n, 5 + n, 1, request_sampling(request_key(n, 0), **each), list(range(6 + n)), **own)
        for n, each in enumerate(settings)
    )
    batches.begin(CyclePlan(decodes=decodes))
    everything = CycleBudget(tuple(range(len(decodes))), STEPS, 2)
    batch = batches.draft_batch(batches.decode(decodes), everything)
    assert batch is not None
    return batch


def logits_of(bs: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(bs * NODES, vocab, generator=torch.Generator().manual_seed(seed))


def at_level(ranking: DraftRanking, level: int) -> DraftRanking:
    for _ in range(level):
        ranking = ranking.deeper()
    return ranking


MIXED = ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 0.0})


@pytest.mark.parametrize("level", range(STEPS))
@pytest.mark.parametrize("settings", [MIXED, MIXED[1:3]], ids=["mixed", "all sampled"])
def test_the_first_child_is_the_targets_draw_where_draft_and_target_agree(
    level: int, settings: tuple[dict[str, Any], ...]
) -> None:
    batch = batch_of(*settings)
    assert batch.ranking.noise is not None
    logits = logits_of(len(settings))
    _, tokens = at_level(batch.ranking, level).best(logits, 4)
    positions = (batch.seq_lens + 1 + level)[:, None].expand(-1, NODES)
    rows = logits.unflatten(0, (-1, NODES))
    drawn, _ = draw(rows, positions, batch.sampling)
    assert tokens[:, 0].tolist() == drawn.flatten().tolist()
    _, elsewhere = at_level(batch.ranking, level + 1 if level == 0 else 0).best(logits, 4)
    assert not torch.equal(tokens, elsewhere), "every level has noise of its own"


def test_scores_are_the_softmax_of_the_perturbed_logits_and_greedy_rows_stay() -> None:
    batch, logits = batch_of(*MIXED), logits_of(len(MIXED))
    scores, tokens = batch.ranking.best(logits, VOCAB)
    for row, (values, found) in enumerate(zip(scores, tokens, strict=True)):
        request = row // NODES
        t = MIXED[request]["temperature"]
        exact = logits[row].double()
        if t:
            key, position = torch.tensor([request_key(request, 0)]), batch.seq_lens[request : request + 1] + 1
            exact = exact / t + gumbel(key, position, VOCAB)[0].double()
        expected = exact.log_softmax(0).sort(descending=True)
        assert found.tolist() == expected.indices.tolist()
        torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=1e-5)
    greedy = [row for row in range(len(logits)) if not MIXED[row // NODES]["temperature"]]
    as_before = topk_logprobs(logits[greedy], VOCAB)
    assert all(torch.equal(mine[greedy], theirs) for mine, theirs in zip((scores, tokens), as_before, strict=True))


def test_a_reduced_vocabulary_takes_the_noise_of_its_target_ids() -> None:
    """The draft's first child is the draw of a target that allows only the draft's tokens."""
    batch = batch_of(*MIXED)
    logits = logits_of(len(MIXED))
    _, tokens = batch.ranking.best(logits[:, VOCABULARY], 4, VOCABULARY)
    rows = logits.masked_fill(OTHERS, -torch.inf).unflatten(0, (-1, NODES))
    drawn, _ = draw(rows, (batch.seq_lens + 1)[:, None].expand(-1, NODES), batch.sampling)
    assert tokens[:, 0].tolist() == drawn.flatten().tolist()


PARAMETERS: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": tuple(range(0, VOCAB, 4))},
    "bias": {"logit_bias": tuple((token, 20.0) for token in range(20, 30))},
    "words": {"bad_words": (*((token,) for token in range(40)), (6, 50))},
    "min_tokens": {"stop_ids": tuple(range(60)), "allowed_from": 100},
    "min_p": {"min_p": 0.5},
    "penalty": {"presence_penalty": 30.0},
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_parameters_apply_to_the_draft_as_to_the_draw(name: str, temperature: float) -> None:
    given = {"temperature": temperature, **PARAMETERS[name]}
    batch, logits = batch_of(*MIXED[:2], given), logits_of(3)
    for vocabulary in (None, VOCABULARY):
        own = logits if vocabulary is None else logits[:, vocabulary]
        rows = logits if vocabulary is None else logits.masked_fill(OTHERS, -torch.inf)
        scores, tokens = batch.ranking.best(own, 4, vocabulary)
        positions = (batch.seq_lens + 1)[:, None].expand(-1, NODES)
        drawn, _ = draw(rows.unflatten(0, (-1, NODES)), positions, batch.sampling)
        assert tokens[:, 0].tolist() == drawn.flatten().tolist()
        without = batch_of(*MIXED[:2], {"temperature": temperature}).ranking.best(own, 4, vocabulary)
        assert torch.equal(scores[: 2 * NODES], without[0][: 2 * NODES]), "other requests stay as they are"
    where_noise_is_captured = batch_of(*MIXED[:2], given, sizes=(4,)).ranking
    assert where_noise_is_captured.parameters is None


def test_a_parameter_that_allows_no_drafted_token_leaves_padding() -> None:
    batch = batch_of({"temperature": 1.0, "allowed_token_ids": (int(OTHERS.nonzero()[0]),)}, {"temperature": 1.0})
    scores, tokens = batch.ranking.best(logits_of(2)[:, VOCABULARY], 3, VOCABULARY)
    assert scores[:NODES].isneginf().all()
    assert scores[NODES:].isfinite().all()
    roots, parents = torch.zeros(len(tokens), dtype=torch.int64), torch.zeros_like(tokens)
    tree = batch.ranking.without_refused(build_tree(roots, roots, tokens, parents, 1, scores))
    assert (tree.tokens[:, 1:] < 0).tolist() == [[True] * 3] * NODES + [[False] * 3] * NODES


class OnlyEven:
    """A grammar that allows even tokens."""

    words, failure = -(-VOCAB // MASK_WORD), None

    def mask(self, text: object, path: tuple[int, ...] = ()) -> Any:
        return None if any(token % 2 for token in path) else np.full(self.words, 0x55555555, dtype=np.int32)


def test_the_grammar_masks_before_the_noise() -> None:
    batch, logits = batch_of(*MIXED, grammar_matcher=cast(Any, OnlyEven())), logits_of(len(MIXED))
    ranking = batch.ranking.advance(torch.tensor([[2, 3]] * len(MIXED)))
    root, _ = batch.ranking.best(logits[::NODES], 5)
    assert root.isfinite().all()
    scores, tokens = ranking.best(logits, 5)
    assert scores[::NODES].isfinite().all()
    assert scores[1::NODES].isneginf().all(), "below a refused node"
    even = logits.masked_fill(torch.arange(VOCAB) % 2 == 1, -torch.inf).unflatten(0, (-1, NODES))
    drawn, _ = draw(even, (batch.seq_lens + 2)[:, None].expand(-1, NODES), batch.sampling)
    assert tokens[::NODES, 0].tolist() == drawn[:, 0].tolist()


def test_rankings_of_further_cycles_come_in_as_tensors() -> None:
    """What a graph captured must work for other requests, with other keys, temperatures and positions."""
    first, second = batch_of(*MIXED).ranking, batch_of(*MIXED[::-1]).ranking
    logits = logits_of(len(MIXED))
    renewed = at_level(builder(first, iter(TensorReader(second).read(second)))(), 2)
    for mine, theirs in zip(renewed.best(logits, 4), at_level(second, 2).best(logits, 4), strict=True):
        assert torch.equal(mine, theirs)


def test_greedy_batches_on_a_cpu_make_no_noise() -> None:
    batch = batch_of({"temperature": 0.0}, {"temperature": 0.0})
    assert batch.ranking.noise is None
    logits = logits_of(2)
    assert all(map(torch.equal, batch.ranking.best(logits, 4), topk_logprobs(logits, 4)))


def test_without_coupling_children_rank_by_probability() -> None:
    batch, logits = batch_of(*MIXED, {"temperature": 1.0, "min_p": 0.5}, coupling=False), logits_of(len(MIXED) + 1)
    assert all(map(torch.equal, batch.ranking.best(logits, 4), topk_logprobs(logits, 4)))


def test_a_draft_that_starts_one_position_later_keeps_its_noise() -> None:
    """A draft language model reads verified_id first, so its lengths are one more."""
    batch = batch_of(*MIXED)
    assert batch.past_verified().ranking is batch.ranking
    assert batch.past_verified().seq_lens.equal(batch.seq_lens + 1)
