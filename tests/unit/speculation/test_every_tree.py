"""Properties of the trees of all builders, over random proposals. To cover a new builder, add it to BUILDERS.

Nodes see their ancestors only. Parents come before children and score no less. Positions follow depths. Padding is
under the root and has no children. Links lead to exactly the children.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_server.plan import Decode
from eagle_server.speculation.merge import best, join_trees
from eagle_server.speculation.prefix_tree import beam_tree
from eagle_server.speculation.static_tree import Choices, ranks_of, sorted_choices, static_tree, steps_of
from eagle_server.speculation.tree import Tree, build_tree
from eagle_server.speculation.tree_config import TreeConfig
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.batch.draft_ranking import BY_PROBABILITY
from eagle_server.worker.drafters.interface import DrafterSetup
from eagle_server.worker.drafters.medusa import MedusaTree
from eagle_server.worker.drafters.ngram.drafter import NgramDrafter, NgramTries
from tests.support import drafts
from tests.support.reference import TOPK, generate_medusa_buffers
from tests.support.sampling import request_sampling
from tests.support.trees import children, path_to

CPU = torch.device("cpu")
VOCAB = 12
ROOT = 7


def starts(bs: int) -> torch.Tensor:
    return torch.arange(5, 5 + bs)


def batch_of(bs: int, **fields: object) -> DecodeBatch:
    """What the drafters here read of a batch of requests with one root each."""
    common = {"verified_id": torch.full((bs,), ROOT), "seq_lens": starts(bs), "seq_lens_host": (3,) * bs}
    return cast(DecodeBatch, cast(Any, SimpleNamespace(**common, ranking=BY_PROBABILITY, **fields)))


def candidate_pool(draw: st.DrawFn) -> Tree:
    """A dynamic tree: the best drafted nodes, by scores that often tie."""
    bs, topk, steps = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = [(bs, topk), *[(bs, topk, topk)] * (steps - 1)]
    scores = [-torch.randint(4, shape, generator=source) / 2 for shape in shapes]
    tokens = [
        torch.rand(*shape[:-1], VOCAB, generator=source).topk(topk).indices for shape in shapes
    ]  # siblings differ
    pool, nodes = drafts.draft(scores[0], scores[1:], tokens)
    return pool.tree(draw(st.integers(1, len(nodes[0]))), ROOT, starts(bs))


def choices(draw: st.DrawFn) -> Choices:
    """Up to 16 nodes in the order in which they were added. A node may come before a better sibling."""
    nodes: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 16))):
        node = (*draw(st.sampled_from([(), *(node for node in nodes if len(node) < 5)])), draw(st.integers(0, 5)))
        if node not in nodes:
            nodes.append(node)
    return tuple(nodes)


def medusa(draw: st.DrawFn) -> Tree:
    """A proposal of `MedusaTree`. The heads' best tokens differ by request and depth."""
    tree, bs = choices(draw), draw(st.integers(1, 3))

    def heads(features: torch.Tensor, steps: int) -> torch.Tensor:
        return torch.rand(steps, len(features), VOCAB, generator=torch.Generator().manual_seed(3))

    vocabulary: dict[str, Any] = {"draft_vocab_size": VOCAB, "target_ids": torch.Tensor.long}
    vars(heads).update(vocabulary)
    proposer = MedusaTree(cast(Any, heads), DrafterSetup(TreeConfig(choices=tree), CPU))
    return proposer.propose(torch.zeros(bs, 1), batch_of(bs, steps=99, nodes=999))


def static(draw: st.DrawFn) -> Tree:
    """A proposal like that of `StaticLevels`. A node's token is its rank."""
    tree, bs = choices(draw), draw(st.integers(1, 3))
    parents = static_tree(tree, CPU).parents.expand(bs, -1)
    tokens = torch.tensor([node[-1] for node in sorted_choices(tree)]).expand(bs, -1)
    scores = -torch.tensor([float(len(node)) for node in sorted_choices(tree)]).expand(bs, -1)
    return build_tree(torch.full((bs,), ROOT), starts(bs), tokens, parents, steps_of(tree), scores)


def packed_beam(draw: st.DrawFn) -> Tree:
    """A proposal from beams with a common first token: all nodes and padding, or the best nodes."""
    bs, count, width = draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 5)))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    beam = torch.randint(3, (bs, count, width), generator=source)
    beam[:, :, 0] = ROOT
    scores = -((beam * torch.arange(1, width + 1)) % 3).cumsum(-1).float()
    scores -= scores[:, :, :1].clone()
    return beam_tree(beam, scores, starts(bs), draw(st.integers(1, count * (width - 1) + 3)))


def trie(draw: st.DrawFn) -> Tree:
    """A proposal of `NgramDrafter`, for texts with and without repetitions, and one padding request."""
    texts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3))
    sampling = request_sampling(temperature=draw(st.sampled_from([0.0, 0.8])))
    decodes = tuple(Decode(row, len(text) - 1, text[-1], sampling, text) for row, text in enumerate(texts))
    batch = batch_of(len(texts) + 1, decodes=decodes)
    steps = draw(st.integers(1, 5))
    drafter = NgramDrafter(NgramTries(steps, draw(st.integers(2, 12))))
    return drafter.propose(None, batch)


def joined_trees(draw: st.DrawFn) -> Tree:
    """A dynamic tree joined with a trie of the same requests, cut to the best nodes."""
    pool, grams = candidate_pool(draw), trie(draw)
    requests = torch.arange(min(len(pool.tokens), len(grams.tokens)))
    union, _ = join_trees(pool.rows_of(requests), grams.rows_of(requests), max(pool.steps, grams.steps))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    chances = torch.rand(union.tokens[:, 1:].shape, generator=source) * 0.98 + 0.001
    return best(union, chances, draw(st.integers(1, union.size - 1)))


BUILDERS = {each.__name__: each for each in (candidate_pool, medusa, static, packed_beam, trie, joined_trees)}


@pytest.mark.parametrize("builder", BUILDERS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_tree_is_a_tree_whoever_built_it(builder: str, data: st.DataObject) -> None:
    tree = BUILDERS[builder](cast(st.DrawFn, data.draw))
    bs, size = tree.tokens.shape
    seq_lens = starts(bs)
    assert tree.retrive_index.tolist() == [[r * size + i for i in range(size)] for r in range(bs)]
    assert tree.scores is not None
    scores = torch.cat([torch.zeros(bs, 1), tree.scores], dim=1)
    assert (tree.scores <= scores.gather(1, tree.parents[:, 1:]) + 1e-5).all(), "no child scores above its parent"
    for r, parents in enumerate(tree.parents.tolist()):
        tokens = tree.tokens[r].tolist()
        assert parents[0] == -1
        assert tokens[0] == ROOT
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node), "parents come first"
        paths = [path_to(parents, node) for node in range(size)]
        assert [row.nonzero().flatten().tolist() for row in tree.mask[r]] == paths, "ancestors and self only"
        assert tree.depths[r].tolist() == [len(path) - 1 for path in paths]
        assert max(map(len, paths)) - 1 <= tree.steps
        assert tree.positions[r].tolist() == [int(seq_lens[r]) + len(path) - 1 for path in paths]
        for node in range(size):
            below = list(children(tree, r, node))
            assert below == [i for i, parent in enumerate(parents) if parent == node]
            named = [tokens[child] for child in below if tokens[child] >= 0]
            assert len(set(named)) == len(named), "no two siblings guess the same token"
        for node, token in enumerate(tokens):
            if token < 0:
                assert parents[node] == 0, "padding is under the root"
                assert node not in parents, "padding has no children"


@given(data=st.data())
def test_medusas_buffers_static_trees_and_the_tree_built_of_them_agree(data: st.DataObject) -> None:
    """Three forms of one list of choices: the published buffers, an EAGLE head's levels, the verified tree."""
    tree = choices(cast(st.DrawFn, data.draw))
    buffers, grown = generate_medusa_buffers(tree), static_tree(tree, CPU)
    nodes = torch.zeros(1, len(tree), dtype=torch.int64)
    built = build_tree(torch.tensor([ROOT]), torch.tensor([0]), nodes, grown.parents[None], steps_of(tree))
    assert built.mask[0].equal(buffers["medusa_attn_mask"][0, 0] == 0)
    assert built.positions[0].equal(buffers["medusa_position_ids"])
    assert ranks_of(tree) == grown.topk <= TOPK
    leaves = [i for i in range(len(tree) + 1) if not list(children(built, 0, i))]
    paths = [path_to(built.parents[0].tolist(), leaf) for leaf in reversed(leaves)]
    assert [[i for i in path if i >= 0] for path in buffers["retrieve_indices"].tolist()] == paths
