"""Tree window attention and its merge with the prefix: torch twin against float64 loops, kernel against twin."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eagle_server.cache.pool import LatentPool, LatentShape
from eagle_server.ops.tree.attention import add_sinks, merge_states, tree_block_attention
from eagle_server.ops.triton_support import HAS_TRITON
from tests.support.covering import covering
from tests.support.kernels import each_variant

interpreted = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and its interpreter"
)
SLOTS = 300
# query heads, KV heads, key size, value size (smaller: values are the front of the keys), requests, rows, columns
SHAPES = [
    (2, 2, 64, 64, 1, 1, 1),
    (4, 2, 64, 64, 2, 7, 13),
    (6, 1, 128, 128, 1, 5, 33),
    (8, 2, 80, 80, 2, 16, 40),  # a size that is no power of two
    (2, 1, 256, 256, 1, 3, 3),
    (3, 1, 80, 64, 2, 6, 6),
    (16, 1, 576, 512, 1, 9, 9),
    (1, 1, 64, 64, 1, 128, 130),
]


@dataclass(frozen=True)
class Case:
    q: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    mask: Tensor
    scale: float
    prefix: tuple[Tensor, Tensor] | None

    def run(self, attend: Callable[..., Tensor], dtype: torch.dtype | None = None) -> Tensor:
        rows, heads = self.q.shape[:2]
        out = torch.full((rows, heads, self.values.shape[2]), math.nan, dtype=dtype or self.q.dtype)
        written = attend(self.q, self.keys, self.values, self.slots, self.mask, self.scale, self.prefix, out)
        assert written is out
        return out


def case(shape: tuple[int, ...], dtype: torch.dtype, *, prefix: bool = True, seed: int = 0) -> Case:
    """Every third row sees nothing, no row sees the last column, and unseen slots hold NaN."""
    heads, kv_heads, dim, value_dim, bs, rows, width = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    mask = torch.rand(bs, rows, width, generator=generator) < 0.4
    mask[:, 2::3] = False
    mask[:, :, -1] &= width == 1
    mask[:, 0, 0] = True
    slots = torch.randperm(SLOTS, generator=generator)[: bs * width].view(bs, width)
    # Not dense: every second slot of a larger pool with one more head, like the layers of a common pool.
    keys = normal(2 * SLOTS, kv_heads + 1, dim)[::2, :kv_heads]
    values = keys[..., :value_dim] if value_dim < dim else normal(SLOTS, kv_heads, dim)
    written = torch.zeros(SLOTS, dtype=torch.bool)
    written[slots[mask.any(1)]] = True
    for pool in (keys, values):
        pool[~written] = math.nan
    lse = torch.randn(bs * rows, heads, generator=generator) * 3
    states = normal(bs * rows, heads, value_dim)
    lse[1::4], states[1::4] = -math.inf, math.nan  # no prefix: the content of its output must be ignored
    q = normal(bs * rows, heads + 2, dim)[:, 1:-1]  # a slice of a wider projection
    return Case(q, keys, values, slots, mask, dim**-0.5, (states, lse) if prefix else None)


def by_loops(case: Case) -> Tensor:
    """By the definition, one row and head at a time. The prefix counts as one key with mass 2^lse."""
    bs, rows, width = case.mask.shape
    heads, shared = case.q.shape[1], case.q.shape[1] // case.keys.shape[1]
    out = torch.zeros(bs * rows, heads, case.values.shape[2], dtype=torch.float64)
    for row in range(bs * rows):
        request, r = divmod(row, rows)
        for head in range(heads):
            mass, total = torch.zeros_like(out[0, 0]), 0.0
            if case.prefix is not None and case.prefix[1][row, head] > -math.inf:
                total = 2.0 ** float(case.prefix[1][row, head])
                mass += total * case.prefix[0][row, head].double()
            for column in range(width):
                if case.mask[request, r, column]:
                    place = case.slots[request, column], head // shared
                    score = case.q[row, head].double() @ case.keys[place].double()
                    weight = math.exp(case.scale * float(score))
                    mass, total = mass + weight * case.values[place].double(), total + weight
            out[row, head] = mass / total if total else mass
    return out


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[5] < 128], ids=str)
def test_the_twin_is_attention_by_the_definition(shape, prefix):
    given = case(shape, torch.float64, prefix=prefix)
    torch.testing.assert_close(given.run(tree_block_attention), by_loops(given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_twin_computes_in_float32(dtype):
    given = case(SHAPES[1], dtype)
    out = given.run(tree_block_attention.variants["torch"], torch.float32)
    torch.testing.assert_close(out.double(), by_loops(given), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("shape", "prefix"), covering(((s,) for s in SHAPES), [True, False], together=1), ids=str)
@each_variant(tree_block_attention)
def test_every_variant_equals_the_twin(variant, shape, prefix):
    given = case(shape, torch.float32, prefix=prefix, seed=1)
    expected = given.run(tree_block_attention.variants["torch"])
    assert not expected.isnan().any()
    torch.testing.assert_close(given.run(tree_block_attention), expected, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5]], ids=str)
def test_the_kernel_equals_its_twin_in_16_bits(shape):
    """Without bfloat16: the interpreter's dot multiplies its bits as integers. The GPU test covers it."""
    given = case(shape, torch.float16, seed=2)
    found, expected = (
        given.run(tree_block_attention.variants["triton"]),
        given.run(tree_block_attention.variants["torch"]),
    )
    torch.testing.assert_close(found, expected, rtol=3e-3, atol=3e-3)


@interpreted
def test_the_kernel_reads_a_latent_pool_in_place():
    pool = LatentPool([LatentShape(64, 16)] * 2, SLOTS, torch.float32, torch.device("cpu"))
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(3)))
    given = case((4, 1, 80, 64, 2, 5, 8), torch.float32)
    given = Case(given.q, pool.keys[1], pool.values[1], given.slots.int(), given.mask, given.scale, given.prefix)
    expected = by_loops(given).float()
    for attend in (tree_block_attention.variants["triton"], tree_block_attention.variants["torch"]):
        torch.testing.assert_close(given.run(attend), expected, rtol=1e-4, atol=1e-5)


@interpreted
def test_values_wider_than_keys_are_refused():
    given = case(SHAPES[1], torch.float32)
    narrow = Case(given.q[..., :32], given.keys, given.values, given.slots, given.mask, 1.0, given.prefix)
    with pytest.raises(ValueError, match="no wider"):
        narrow.run(tree_block_attention.variants["triton"])


def states(*, rows: int = 11, heads: int = 3, dim: int = 80) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randn(2, rows, heads, dim, generator=generator).unbind(0)
    lse_a, lse_b = (torch.randn(2, rows, heads, generator=generator) * 40).unbind(0)
    lse_a[0], a[0] = -math.inf, math.nan
    lse_b[1], b[1] = -math.inf, math.nan
    lse_a[2], lse_b[2] = -math.inf, -math.inf
    return a, lse_a, b, lse_b


def test_merging_weighs_parts_by_their_mass_and_ignores_empty_ones():
    a, lse_a, b, lse_b = states()
    out, lse = merge_states(a, lse_a, b, lse_b)
    assert torch.equal(out[0], b[0]) and torch.equal(lse[0], lse_b[0])
    assert torch.equal(out[1], a[1]) and torch.equal(lse[1], lse_a[1])
    assert not out[2].any() and (lse[2] == -math.inf).all()
    mass_a, mass_b = torch.exp2(lse_a[3:, :, None].double()), torch.exp2(lse_b[3:, :, None].double())
    expected = (mass_a * a[3:] + mass_b * b[3:]) / (mass_a + mass_b)
    torch.testing.assert_close(out[3:].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[3:].double(), (mass_a + mass_b).log2()[..., 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 2, 64, 64, 2, 7, 13), (3, 1, 80, 64, 2, 6, 6)], ids=str)
def test_prefix_and_tree_merged_are_one_masked_attention(shape):
    """Attention over the prefix uses the same operation, as a window that every row sees."""
    heads, kv_heads, _, value_dim, bs, rows, width = shape
    length = 17
    generator = torch.Generator().manual_seed(5)
    given = case(shape, torch.float64, prefix=False)
    keys = torch.randn(SLOTS, *given.keys.shape[1:], generator=generator, dtype=torch.float64)
    values = keys[..., :value_dim] if value_dim < keys.shape[2] else keys.flip(-1)
    slots = torch.randperm(SLOTS, generator=generator)[: bs * (length + width)].view(bs, -1)
    everything = torch.ones(bs, rows, length, dtype=torch.bool)
    mask = torch.cat([everything, given.mask], dim=2)

    prefix = Case(given.q, keys, values, slots[:, :length], everything, given.scale, None).run(tree_block_attention)
    queries = given.q.view(bs, rows, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("brgsd,bwgd->brgsw", queries, keys[slots[:, :length]]) * given.scale
    lse = scores.logsumexp(-1).view(bs * rows, heads) / math.log(2)
    merged = Case(given.q, keys, values, slots[:, length:], given.mask, given.scale, (prefix, lse))

    dense = Case(given.q, keys, values, slots, mask, given.scale, None)
    torch.testing.assert_close(merged.run(tree_block_attention), by_loops(dense), rtol=1e-9, atol=1e-9)


def with_sinks(add, out, lse, sinks):
    out, lse = out.clone(), lse.clone()
    add(out, lse, sinks)
    return out, lse


def test_a_sink_is_one_more_key_without_a_value():
    """And with the output and its log-sum-exp, out * sigmoid(lse - sink)."""
    given = case(SHAPES[1], torch.float64)
    assert given.prefix is not None
    (out, lse), sinks = given.prefix, torch.tensor([0.7, -2.0, 30.0, -40.0], dtype=torch.float64)
    lse = lse.double()
    merged, total = with_sinks(add_sinks, out, lse, sinks)
    mass = 2.0**lse + sinks.exp()
    torch.testing.assert_close(total, mass.log2())
    weight = torch.sigmoid(lse * math.log(2) - sinks)[..., None]
    torch.testing.assert_close(merged, torch.where(weight > 0, out.nan_to_num() * weight, 0))


@interpreted
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[6]], ids=str)
@each_variant(add_sinks)
def test_every_variant_of_sinks_equals_the_twin(variant, shape):
    given = case(shape, torch.float32)
    assert given.prefix is not None
    sinks = 3 * torch.randn(shape[0], generator=torch.Generator().manual_seed(1))
    expected = with_sinks(add_sinks.variants["torch"], *given.prefix, sinks)
    assert not expected[0].isnan().any()
    torch.testing.assert_close(with_sinks(add_sinks, *given.prefix, sinks), expected)
