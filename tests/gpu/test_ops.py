"""Every compiled operation against its torch twin, over odd sizes: kernels on a GPU, twins on the CPU.

On the CPU an operation is its twin. There the tests check the twin against the formula, if there is one.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from eagle_server.attention.recurrent import TreeRows
from eagle_server.attention.spec_info import retrive_links
from eagle_server.cache.states import StatePool
from eagle_server.ops.kv.indices import build_draft_decode_kv_indices, build_kv_indices
from eagle_server.ops.kv.move import keep_accepted
from eagle_server.ops.layers.normed_pairs import PairNorms, normed_pairs
from eagle_server.ops.linear.fp8_rows import fp8_rows
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight, quantize
from eagle_server.ops.linear.rounded import RoundedWeight, rounded_linear
from eagle_server.ops.recurrent.nodes import RecurrentLayer, RecurrentShape
from eagle_server.ops.sampling.correction import Correction, correct_guesses
from eagle_server.ops.sampling.draw import draw_tokens
from eagle_server.ops.sampling.gumbel import gumbel
from eagle_server.ops.sampling.topk import DrawNoise, score_children, topk_logprobs
from eagle_server.ops.sampling.truncate import NO_TOP_K, truncate_rows
from eagle_server.ops.tree.accept import walk_tree
from eagle_server.ops.tree.build import ancestors
from eagle_server.ops.tree.candidates import CandidatePool, Children
from eagle_server.ops.tree.mask import SlidingWindow, pack_tree_mask
from eagle_server.speculation.tree import Tree
from tests.gpu.conftest import moved, on_cpu
from tests.support.drafts import Pool, scored
from tests.support.kernels import climb
from tests.support.kernels import random_parents as random_trees
from tests.support.reference import verify_tree_greedy
from tests.unit.ops.recurrent.test_nodes import QWEN3_5_9B, SHAPES, random_layer

TREES = [(1, 1, 1, 2), (3, 2, 3, 7), (2, 4, 3, 13), (5, 8, 6, 64), (2, 10, 7, 129)]  # bs, topk, steps, nodes


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pool(bs: int, topk: int, steps: int, nodes: int, vocab: int = 9) -> Pool:
    """A draft as from a drafter: random children, expanded by score."""
    random_ = generator(nodes)
    scores = -torch.rand(bs, topk, generator=random_).cumsum(1)
    found = Pool([scored(_siblings(bs, topk, vocab, random_), scores)], [])
    for step in range(steps - 1):
        tokens = torch.stack([_siblings(bs, topk, vocab, random_) for _ in range(topk)], dim=1)
        children = scores[:, :, None] - torch.rand(bs, topk, topk, generator=random_)
        found.levels.append(scored(tokens, children))
        if step < steps - 2:
            scores, chosen = children.flatten(1).topk(topk, dim=1)
            found.chosen.append(chosen)
    return found


def _siblings(bs: int, topk: int, vocab: int, random_: torch.Generator) -> Tensor:
    """Distinct tokens, as from a top-k."""
    return torch.stack([torch.randperm(max(vocab, topk), generator=random_)[:topk] for _ in range(bs)])


def random_parents(bs: int, size: int, seed: int = 0) -> Tensor:
    rng = random.Random(seed)
    return torch.tensor([[-1, *(rng.randrange(node) for node in range(1, size))] for _ in range(bs)])


def assert_same(found: object, expected: object) -> None:
    torch.testing.assert_close(on_cpu(found), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("bs", "topk", "steps", "nodes"), TREES)
def test_trees_are_linked_alike(device: torch.device, bs: int, topk: int, steps: int, nodes: int) -> None:
    drafted = pool(bs, topk, steps, nodes)
    expected, there = drafted.tree(nodes - 1), drafted.to(device).tree(nodes - 1)
    assert_same(parts_of(there), parts_of(expected))
    assert_same(retrive_links(moved(expected.parents, device)), retrive_links(expected.parents))
    mask, depths = ancestors(expected.parents, steps)
    assert torch.equal(mask, expected.mask) and torch.equal(depths, expected.depths)


def parts_of(tree: Tree) -> tuple[Tensor, ...]:
    return tree.tokens, tree.parents, tree.depths, tree.mask


@pytest.mark.parametrize(("bs", "topk", "steps", "nodes"), TREES)
def test_trees_are_walked_alike(device: torch.device, bs: int, topk: int, steps: int, nodes: int) -> None:
    random_ = generator(bs)
    tokens, parents, depths, mask = parts_of(pool(bs, topk, steps, nodes, vocab=max(topk, 3)).tree(nodes - 1, 0))
    drawn = torch.randint(0, max(topk, 3), (bs, nodes), generator=random_)
    scores = torch.where(torch.rand(bs, nodes, generator=random_) < 0.9, -1.0, math.nan)
    arguments = (tokens, parents, depths, mask, drawn, scores)
    path, accept_length, emitted, _, good = expected = walk_tree(*arguments, steps)
    assert_same(walk_tree(*moved(arguments, device), steps), expected)
    assert good.shape == (bs,)
    links = (tokens, *retrive_links(parents), drawn)
    by_links = verify_tree_greedy(*moved(links, device), steps)
    assert_same(by_links, (path, accept_length, emitted))


def test_two_siblings_with_one_token_are_walked_alike(device: torch.device) -> None:
    """The second sibling has the longer path. The walk by mask takes it; the walk by links takes the first."""
    parents = torch.tensor([[-1, 0, 0, 2]])
    mask, depths = ancestors(parents, 2)
    tokens, drawn = torch.tensor([[0, 5, 5, 6]]), torch.tensor([[5, 7, 6, 8]])
    arguments = (tokens, parents, depths, mask, drawn, torch.ones(1, 4))
    path, length, emitted, *_ = on_cpu(walk_tree(*moved(arguments, device), 2))
    assert (path.tolist(), length.tolist(), emitted.tolist()) == ([[0, 2, 3]], [2], [[5, 6, 8]])
    path, length, _ = on_cpu(verify_tree_greedy(*moved((tokens, *retrive_links(parents), drawn), device), 2))
    assert (path.tolist(), length.tolist()) == ([[0, 1, -1]], [1])


@pytest.mark.parametrize(("n", "vocab"), [(1, 1), (3, 7), (17, 1025), (2, 128256)])
def test_noise_is_alike(device: torch.device, n: int, vocab: int) -> None:
    keys = torch.randint(-(1 << 62), 1 << 62, (n,), generator=generator(n))
    positions = torch.arange(n) * 12345
    expected = gumbel(keys, positions, vocab)
    found = gumbel(*moved((keys, positions), device), vocab)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("n", "vocab"), [(1, 1), (4, 63), (5, 2049), (9, 4096), (3, 128256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_alike(device: torch.device, n: int, vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(n, vocab, generator=generator(vocab)) * 3).to(dtype)
    keys, positions = torch.arange(n) * 999331 - 5, torch.arange(n) + 40
    temperature = torch.tensor([0.0, 0.7, 1.0])[torch.arange(n) % 3]
    tokens, scores = on_cpu(draw_tokens(*moved((logits, keys, positions, temperature), device)))
    drawn = temperature[:, None] > 0
    exact = logits.double() / torch.where(drawn, temperature[:, None], 1.0) + drawn * gumbel(keys, positions, vocab)
    best = exact.topk(min(2, vocab), dim=1)
    clear = (best.values[:, 0] - best.values[:, -1] > 1e-4) | (vocab == 1)
    assert torch.equal(tokens[clear], best.indices[clear, 0])
    torch.testing.assert_close(scores.double(), best.values[:, 0], rtol=1e-5, atol=1e-5)


def test_ties_and_broken_rows_draw_alike(device: torch.device) -> None:
    logits = torch.zeros(5, 3000)
    logits[0, [2999, 17, 2100]] = 4.0
    logits[1, 2500] = math.nan
    logits[2, 2501] = math.inf
    logits[3] = -math.inf
    zeros = torch.zeros(5, dtype=torch.int64)
    tokens, scores = on_cpu(draw_tokens(*moved((logits, zeros, zeros, torch.zeros(5)), device)))
    assert tokens[0] == 17 and tokens[4] == 0
    assert scores.isfinite().tolist() == [True, False, False, False, True]
    assert bool(((tokens >= 0) & (tokens < 3000)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocab", "k"), [(1, 8, 8), (3, 63, 4), (7, 2049, 1), (5, 32000, 10), (2, 128256, 16)])
def test_best_children_are_alike(device: torch.device, dtype: torch.dtype, n: int, vocab: int, k: int) -> None:
    logits = (torch.randn(n, vocab, generator=generator(vocab)) * 4).to(dtype)
    logp, ids = on_cpu(topk_logprobs(moved(logits, device), k))
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(logp.double(), exact.topk(k, dim=-1).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp.double(), exact.gather(1, ids), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocab", "k"), [(1, 8, 8), (3, 63, 4), (7, 2049, 1), (5, 32000, 10), (4, 999, 20)])
def test_coupled_children_are_alike(device: torch.device, dtype: torch.dtype, n: int, vocab: int, k: int) -> None:
    random_ = generator(vocab)
    logits = (torch.randn(n, vocab, generator=random_) * 4).to(dtype)
    logits[:, 1 : vocab // 2 : 2] = -math.inf
    ids = torch.randperm(3 * vocab, generator=random_)[:vocab]
    keys, positions = torch.arange(n) * 999331 - 5, torch.arange(n) + 40
    temperature = torch.tensor([0.0, 0.7, 1.0])[torch.arange(n) % 3]
    arguments = (logits, keys, positions, temperature, ids)
    logits_, *noise = moved(arguments, device)
    logp, tokens = on_cpu(topk_logprobs(logits_, k, noise.pop(), DrawNoise(*noise)))
    tokens = torch.zeros(3 * vocab, dtype=torch.int64).index_copy(0, ids, torch.arange(vocab))[tokens]  # the draft's
    t, noise_by_hand = temperature.double()[:, None], gumbel(keys, positions, 3 * vocab)[:, ids]
    scores = logits.double() / torch.where(t > 0, t, 1.0) + noise_by_hand.where(t > 0, 0.0)
    exact = scores.log_softmax(-1)
    torch.testing.assert_close(logp.double(), exact.topk(k, dim=-1).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp.double(), exact.gather(1, tokens), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == k for row in tokens.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_child_is_the_draw(device: torch.device, dtype: torch.dtype) -> None:
    """With a draft that equals the target: the kernels compute the same score, in every bit."""
    n, vocab = 64, 32003
    logits = torch.randn(n, vocab, generator=generator(n)).to(dtype)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.9])[torch.arange(n) % 4]
    noise = moved((torch.arange(n) * 999331 - 5, torch.arange(n) + 40, temperature), device)
    drawn, _ = draw_tokens(moved(logits.float(), device), *noise)
    _, children = topk_logprobs(moved(logits, device), 4, noise=DrawNoise(*noise))
    assert_same(children[:, 0], drawn.cpu())


@pytest.mark.parametrize(("bs", "nodes", "vocab", "k"), [(1, 1, 8, 8), (1, 8, 32000, 8), (5, 4, 2049, 4)])
def test_a_level_is_scored_as_by_the_separate_kernels(
    device: torch.device, bs: int, nodes: int, vocab: int, k: int
) -> None:
    """Top-k, target ids, corrections and paths, in every bit."""
    random_ = generator(vocab)
    logits = moved((torch.randn(bs * nodes, vocab, generator=random_) * 4).bfloat16(), device)
    temperature = torch.tensor([0.0, 0.7, 1.0])[torch.arange(bs) % 3]
    noise = DrawNoise(*moved((torch.arange(bs) * 999331 - 5, torch.arange(bs) + 40, temperature), device), 3)
    ids = moved(torch.randperm(3 * vocab, generator=random_)[:vocab], device)
    bins = moved((torch.randn(2, 3, 2, 5, generator=random_), torch.tensor([-4.0, -2.0, -1.0, -0.1])), device)
    correction = Correction(*bins, moved(torch.arange(bs) % 2, device), 1, -0.05)
    above = moved(-torch.rand(bs, nodes, generator=random_), device)
    first = Children(ids.new_zeros(bs, k), *2 * (above.new_zeros(bs, k),))
    pools = CandidatePool(first, Children(*(part.new_zeros(bs, 3 * nodes * k) for part in first)), ids[:0])
    level = Children(*(part[:, nodes * k : 2 * nodes * k].unflatten(1, (nodes, k)) for part in pools.later))
    found = score_children(logits, above, level, ids, noise, correction)
    logp, tokens = topk_logprobs(logits, k, ids, noise)
    guesses = logp.view(bs, nodes, k)
    assert_same(found.tokens, on_cpu(tokens.view(bs, nodes, k)))
    assert_same(found.guesses, on_cpu(guesses))
    assert_same(found.scores, on_cpu(above[:, :, None] + correct_guesses(guesses, correction)))


@pytest.mark.parametrize("vocab", [7, 32000, 128256])
@pytest.mark.parametrize(
    "limit", [(40, 1.0, 0.0), (NO_TOP_K, 0.9, 0.0), (NO_TOP_K, 0.9999, 0.0), (NO_TOP_K, 1.0, 0.1), (2000, 0.8, 0.01)]
)
def test_rows_are_truncated_alike(device: torch.device, vocab: int, limit: tuple[float, float, float]) -> None:
    """A greedy request loses nothing. Where rounding decides about a token, it has little mass."""
    logits = (3 * torch.randn(2, 5, vocab, generator=generator(vocab))).bfloat16().float()
    stochastic = torch.tensor([1])
    arguments = (logits, torch.tensor([0.0, 1.3]), torch.tensor([limit, limit]).T.contiguous(), stochastic, stochastic)
    found, expected = on_cpu(truncate_rows(*moved(arguments, device))), truncate_rows(*arguments)
    assert_same(found[0], logits[0])
    assert_same(found, logits.where(found.isfinite(), -math.inf))
    differ = found.isfinite() != expected.isfinite()
    assert float(((logits.double() / 1.3).softmax(-1) * differ).sum(-1).max()) < 1e-4


@pytest.mark.parametrize("keeps_normed", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (7, 2048), (64, 4096), (3, 5120)])
def test_pairs_of_an_eagle3_head_are_alike(device: torch.device, rows: int, size: int, keeps_normed: bool) -> None:
    random_ = generator(size)
    embed, hidden = (torch.randn(n, size, generator=random_).bfloat16() for n in (50, rows))
    gains = [(1 + torch.randn(size, generator=random_) / 4).bfloat16() for _ in range(2)]
    tokens = torch.randint(50, (rows,), generator=random_)
    results = []
    for where in (torch.device("cpu"), device):
        given, norms = moved((tokens, embed, hidden), where), PairNorms(*moved(tuple(gains), where), 1e-5)
        with torch.inference_mode():
            results.append(on_cpu(normed_pairs(*given, norms, keeps_normed=keeps_normed)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", ["fp8", "fp8 in blocks", "int4"])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 384), (2048, 4096), (512, 14336), (544, 2304)])
def test_products_with_rounded_weights(device: torch.device, form: str, outputs: int, inputs: int) -> None:
    """Against the rounded weight in float64. A row's result is the same in every bit, whatever rows are beside it."""
    weight = _rounded(form, outputs, inputs)
    packed = RoundedWeight.packed(weight, device, torch.bfloat16)
    x = torch.randn(200, inputs, generator=generator(inputs)).bfloat16()
    exact = x.double() @ weight.dense().double().t()
    found = {rows: rounded_linear(x[:rows].to(device), packed).cpu() for rows in (1, 5, 16, 17, 64, 200)}
    for rows, product in found.items():
        torch.testing.assert_close(product.double(), exact[:rows], rtol=2**-8, atol=2**-8)
    if device.type == "cuda":
        others = [rows for rows in found if rows <= 64 and not torch.equal(found[rows], found[64][:rows])]
        assert not others, f"{others} rows have other results than 64"
    many = packed.linear(x.to(device)).cpu().double()  # in fp8 the inputs are rounded
    assert float((many - exact).norm() / exact.norm()) < (0.04 if form == "fp8" else 0.01)


def _rounded(form: str, outputs: int, inputs: int) -> QuantizedWeight:
    kind: Quantization = "int4" if form == "int4" else "fp8"
    weight = quantize(torch.randn(outputs, inputs, generator=generator(outputs)) / inputs**0.5, kind)
    if form != "fp8 in blocks":
        return weight
    scales = weight.scales * (0.5 + torch.rand(-(-inputs // 128), outputs, generator=generator()))
    return QuantizedWeight("fp8", weight.codes, scales, torch.zeros_like(scales, dtype=torch.uint8), 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (7, 4096), (64, 14336), (3, 28672)])
def test_rows_are_rounded_to_fp8_alike(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    x = (torch.randn(rows, size, generator=generator(size)) * 3).to(dtype)
    (codes, scales), (codes_, scales_) = fp8_rows(x), on_cpu(fp8_rows(x.to(device)))
    assert_same(scales_, scales)
    assert_same(codes_.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("lens", [[1], [5, 1, 70], [600, 513, 1, 2, 1024]])
def test_slots_are_listed_alike(device: torch.device, lens: list[int]) -> None:
    random_ = generator(len(lens))
    table = torch.randint(0, 10**6, (9, 1100), generator=random_).int()
    req_pool_indices = torch.randperm(9, generator=random_)[: len(lens)]
    kv_lens = torch.tensor(lens)
    outs = []
    for where in (torch.device("cpu"), device):
        out = torch.full((sum(lens) + 37,), -7, dtype=torch.int32, device=where)
        outs.append((build_kv_indices(*moved((table, req_pool_indices, kv_lens), where), out), out))
    assert_same(outs[1], outs[0])
    expected = torch.cat([table[row, :n] for row, n in zip(req_pool_indices, lens, strict=True)])
    assert torch.equal(outs[0][1][:-37], expected) and bool((outs[0][1][-37:] == -7).all())


@pytest.mark.parametrize(("topk", "step"), [(1, 0), (3, 0), (4, 2), (8, 5)])
@pytest.mark.parametrize("lens", [[1], [40, 3, 600]])
def test_slots_of_beams_are_listed_alike(device: torch.device, lens: list[int], topk: int, step: int) -> None:
    rng, random_ = random.Random(step), generator(topk)
    table = torch.randint(0, 10**6, (5, 700), generator=random_).int()
    req_pool_indices = torch.randperm(5, generator=random_)[: len(lens)]
    ancestor_mask = torch.zeros(len(lens), topk, (step + 1) * topk, dtype=torch.bool)
    for b in range(len(lens)):
        for node in range(topk):
            ancestor_mask[b, node, [level * topk + rng.randrange(topk) for level in range(step + 1)]] = True
    seen = step + 1
    outs = []
    for where in (torch.device("cpu"), device):
        out = torch.full((topk * (sum(lens) + len(lens) * seen) + 5,), -7, dtype=torch.int32, device=where)
        table_, indices_, lens_, lineage_ = moved((table, req_pool_indices, torch.tensor(lens), ancestor_mask), where)
        indptr = build_draft_decode_kv_indices(table_, indices_, lens_, lineage_, seen, out)
        outs.append((indptr, out))
    assert_same(outs[1], outs[0])
    own = ancestor_mask[0, 0].nonzero()[:, 0] + lens[0]
    slots = table[req_pool_indices[0], [*range(lens[0]), *own.tolist()]]
    assert outs[0][1][: lens[0] + seen].tolist() == slots.tolist()


@pytest.mark.parametrize("sliding", [0, 3, 50])
@pytest.mark.parametrize(("lens", "size"), [([9], 1), ([20, 33, 7], 7), ([1000, 64], 64), ([70, 300, 66, 129], 63)])
def test_masks_are_packed_alike(device: torch.device, lens: list[int], size: int, sliding: int) -> None:
    mask, depths = ancestors(random_parents(len(lens), size), size)
    kv_lens = torch.tensor([max(n, size) for n in lens])
    capacity = int(((size * kv_lens + 7) // 8).sum()) + 11
    outs = []
    for where in (torch.device("cpu"), device):
        out = torch.full((capacity,), 0xA5, dtype=torch.uint8, device=where)
        indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=where)
        mask_, kv_lens_, depths_ = moved((mask, kv_lens, depths), where)
        pack_tree_mask(mask_, kv_lens_, out, indptr, SlidingWindow(sliding, depths_, depths_) if sliding else None)
        outs.append((out, indptr))
    assert_same(outs[1], outs[0])
    if not sliding:
        bits = torch.tensor([(int(outs[0][0][i // 8]) >> (i % 8)) & 1 for i in range(size * int(kv_lens[0]))])
        dense = torch.cat([torch.ones(size, int(kv_lens[0]) - size, dtype=torch.bool), mask[0]], dim=1)
        assert torch.equal(bits.bool().view_as(dense), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("planes", "row"), [((2, 3), (2, 64)), ((1,), (577,)), ((4,), (1, 7))])
def test_kept_nodes_move_alike(
    device: torch.device, dtype: torch.dtype, planes: tuple[int, ...], row: tuple[int, ...]
) -> None:
    """Chains of moves within a request. A move must not overwrite the source of a later move."""
    bs, window, moves = 3, 16, 5
    data = torch.randn(*planes, 1 + bs * window, *row, generator=generator(1)).to(dtype)
    slots = (torch.randperm(bs * window, generator=generator(2)) + 1).view(bs, window)
    path = torch.tensor([[0, 1, 2, 3, 4], [0, 2, 3, 7, 15], [0, 6, 9, -1, -1]])
    lens, rows = torch.tensor([4, 0, 2]), torch.tensor([1, 2, 0])
    table = torch.zeros(bs, 4 + window, dtype=torch.int32)
    for request, first, own in zip(rows.tolist(), lens.tolist(), slots, strict=True):
        table[request, first : first + window] = own
    source = slots.gather(1, torch.where(path < 0, torch.arange(moves), path))
    expected, found = data.clone(), moved(data, device)
    expected.index_copy_(len(planes), slots[:, :moves].reshape(-1), data.index_select(len(planes), source.view(-1)))
    keep_accepted(found, len(planes), *moved((path, lens, rows, table), device))
    assert_same(found, expected)


@pytest.mark.parametrize("shape", [QWEN3_5_9B, SHAPES["odd"]], ids=["Qwen3.5-9B", "odd"])
@pytest.mark.parametrize(("bs", "size", "deepest"), [(1, 1, 1), (3, 16, 15), (2, 33, 6), (9, 64, 8)])
def test_recurrent_layers_over_trees_are_alike(
    device: torch.device, shape: RecurrentShape, bs: int, size: int, deepest: int
) -> None:
    """bfloat16 inputs over a float32 state; then the longest paths are kept."""
    torch.manual_seed(size)
    layer, parents = random_layer(shape, torch.bfloat16), random_trees(bs, size, deepest, generator(size))
    tree, requests = Tree.linked(parents, parents, torch.zeros(bs, dtype=torch.int64), deepest), torch.arange(bs)
    here, there = (StatePool(1, bs, size, shape, torch.bfloat16, where) for where in (torch.device("cpu"), device))
    here.native = None
    for part, other in zip((here.states, here.rings), (there.states, there.rings), strict=True):
        other.copy_(part.normal_(0, 0.1))
    x, gates = torch.randn(bs * size, shape.channels).bfloat16(), torch.randn(bs * size, 2 * shape.value_heads)
    expected = TreeRows(here, tree, requests).run(x, gates, layer)
    weights = moved((layer.conv, layer.a_log, layer.dt_bias), device)
    rows = TreeRows(there, moved(tree, device), requests.to(device))
    found = rows.run(*moved((x, gates), device), RecurrentLayer(0, shape, *weights))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    kept = [climb(each, size - 1)[::-1] for each in parents.tolist()]
    path = torch.tensor([each + [-1] * (deepest + 1 - len(each)) for each in kept])
    here.keep(path, requests)
    there.keep(*moved((path, requests), device))
    for part, other in zip((here.states, here.rings), (there.states, there.rings), strict=True):
        torch.testing.assert_close(other.cpu(), part, rtol=1e-4, atol=1e-4)
