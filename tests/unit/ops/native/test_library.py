"""The native CPU kernels against torch: every instruction set, odd sizes, and results that no other row changes."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.attention.batches import attn_args_prefill
from eagle_server.attention.interface import AttentionBatch, Causal, LayerSpec, Layout, TreeMask
from eagle_server.attention.native import BoundNative, NativeAttention
from eagle_server.attention.torch_native import TorchNativeAttention
from eagle_server.cache.pool import KVPool, KVShape
from eagle_server.models.config import ModelConfig, RopeConfig
from eagle_server.models.layers import pack_linears
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight, quantize
from eagle_server.ops.native import build
from eagle_server.ops.native import library as native
from eagle_server.ops.native.build import BuildError, compile_kernels, library
from eagle_server.ops.native.linear import NativeWeight, native_linear
from eagle_server.ops.native.sampling import NativeScoring
from eagle_server.ops.sampling.gumbel import gumbel

SLOTS = 400


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 1), (7, 17), (64, 16), (255, 100), (256, 640), (130, 65), (1025, 40)]
)
@pytest.mark.parametrize("kind", ["float32", "halved", "bfloat16"])
@pytest.mark.usefixtures("kernels", "threads")
def test_a_linear_layer_is_torchs_and_its_rows_do_not_depend_on_each_other(
    kind: str, inputs: int, outputs: int
) -> None:
    weight, bias = random(outputs, inputs, seed=1) / inputs**0.5, random(outputs, seed=2)
    weight = weight if kind == "float32" else weight.bfloat16()
    packed = NativeWeight(weight.float() if kind == "halved" else weight)
    assert torch.equal(packed.dense(), weight.float() if kind == "halved" else weight)
    for rows in (1, 2, 5, 6, 7, 13, 31, 50, 97, 200):
        x = random(rows, inputs, seed=rows)
        y = native_linear(x, packed, bias)
        exact = F.linear((x.bfloat16() if kind == "bfloat16" else x).double(), weight.double(), bias.double())
        torch.testing.assert_close(y.double(), exact, atol=2e-5, rtol=2e-5)
        assert torch.equal(y, torch.cat([native_linear(row[None], packed, bias) for row in x[:20]] + [y[20:]]))


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (8, 16), (96, 50), (100, 33), (256, 640), (320, 65)])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.usefixtures("kernels", "threads")
def test_integer_weights_give_the_sums_of_rounded_inputs_and_no_row_changes_another(
    quantization: Quantization, inputs: int, outputs: int
) -> None:
    bias, weight = random(outputs, seed=2), quantize(random(outputs, inputs, seed=1) / inputs**0.5, quantization)
    packed = NativeWeight(weight)
    torch.testing.assert_close(packed.dense(), weight.dense(), atol=0, rtol=0)
    for rows in (1, 2, 5, 6, 7, 13, 31, 50, 97):
        x = random(rows, inputs, seed=rows)
        scale = x.abs().amax(dim=1, keepdim=True) / 127
        exact = F.linear(((x / scale).round() * scale).double(), weight.dense().double(), bias.double())
        y = native_linear(x, packed, bias)
        torch.testing.assert_close(y.double(), exact, atol=1e-4, rtol=1e-4)
        assert torch.equal(y, torch.cat([native_linear(row[None], packed, bias) for row in x[:20]] + [y[20:]]))
    assert native_linear(torch.zeros(1, inputs), packed, bias).equal(bias[None])


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (64, 17), (96, 50), (256, 640), (320, 65)])
@pytest.mark.usefixtures("kernels", "threads")
def test_floats_of_four_bits_are_multiplied_as_they_are(inputs: int, outputs: int) -> None:
    source = torch.Generator().manual_seed(1)
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, generator=source)
    scales = torch.exp2(torch.randint(-6, -1, (inputs // 32, outputs), generator=source).float())
    weight = QuantizedWeight("mxfp4", codes, scales, torch.zeros(scales.shape, dtype=torch.uint8), 32)
    packed, bias = NativeWeight(weight), random(outputs, seed=2)
    assert torch.equal(packed.dense(), weight.dense())
    assert 8 * packed.nbytes <= 4.25 * inputs * (outputs + 15)
    for rows in (1, 2, 5, 6, 7, 13, 50):
        x = random(rows, inputs, seed=rows)
        y = native_linear(x, packed, bias)
        exact = F.linear(x.double(), weight.dense().double(), bias.double())
        torch.testing.assert_close(y.double(), exact, atol=2e-5, rtol=2e-5)
        assert torch.equal(y, torch.cat([native_linear(row[None], packed, bias) for row in x[:20]] + [y[20:]]))


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.008), ("int4", 0.1)])
def test_rounding_keeps_weights_near(quantization: Quantization, most: float) -> None:
    weight = random(64, 256)
    error = (quantize(weight, quantization).dense() - weight).norm() / weight.norm()
    assert error < most


def test_half_the_memory_holds_float32_weights_that_bfloat16_holds_exactly() -> None:
    exact, other = random(64, 64).bfloat16().float(), random(64, 64)
    assert len(NativeWeight(exact).data) * 2 == len(NativeWeight(other).data)


def pool_of(kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, layers: int = 1) -> KVPool:
    pool = KVPool([KVShape(kv_heads, dim)] * layers, SLOTS, dtype, torch.device("cpu"))
    pool.groups[0].copy_(random(*pool.groups[0].shape, seed=5))
    return pool


def batch_of(q_lens: list[int], kv_lens: list[int], mask: Causal | TreeMask) -> AttentionBatch:
    """Requests on scattered slots."""
    table = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(3)).int()[: 3 * 120].view(3, 120) + 1
    table, bs = table[: len(q_lens)], len(q_lens)
    places = [table[i, n - q : n] for i, (q, n) in enumerate(zip(q_lens, kv_lens, strict=True))]
    layout = Layout(tuple(q_lens), tuple(kv_lens), None if isinstance(mask, Causal) else mask.visible.shape[2])
    return AttentionBatch(torch.arange(bs), torch.tensor(kv_lens), table, torch.cat(places).long(), mask, layout)


def trees(sizes: list[int]) -> TreeMask:
    """Random trees, parents first, padded to the largest."""
    generator, rows = torch.Generator().manual_seed(len(sizes)), max(sizes)
    visible, depths = torch.zeros(len(sizes), rows, rows, dtype=torch.bool), torch.zeros(len(sizes), rows).long()
    for tree, size in enumerate(sizes):
        visible[tree, 0, 0] = True
        for node in range(1, size):
            parent = int(torch.randint(node, (1,), generator=generator))
            visible[tree, node] = visible[tree, parent]
            visible[tree, node, node], depths[tree, node] = True, depths[tree, parent] + 1
    return TreeMask(visible, depths, depths)


BATCHES = {
    "decode": batch_of([1, 1, 1], [40, 1, 97], Causal()),
    "prompts": batch_of([30, 5, 1], [30, 77, 20], Causal()),
    "alone": batch_of([9], [120], Causal()),
    "trees": batch_of([9, 4, 1], [60, 4, 21], trees([9, 4, 1])),
    "equal trees": batch_of([13, 13], [40, 73], trees([13, 13])),
}
SPECS = {
    "plain": LayerSpec(0, 0.2),
    "window": LayerSpec(0, 0.2, sliding_window=6),
    "softcap": LayerSpec(0, 0.5, softcap=3.0),
    "both": LayerSpec(0, 0.5, sliding_window=11, softcap=3.0),
    "sinks": LayerSpec(0, 0.2, sliding_window=11, sinks=2 * random(40, seed=5)),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 64), (8, 8, 80), (40, 2, 128), (3, 3, 6), (4, 2, 18), (2, 1, 100)]
)
@pytest.mark.usefixtures("kernels", "threads")
def test_attention_is_torchs(name: str, spec: str, heads: int, kv_heads: int, dim: int) -> None:
    layer, batch, rows = SPECS[spec], BATCHES[name], sum(BATCHES[name].layout.q_lens)
    layer = replace(layer, sinks=None if layer.sinks is None else layer.sinks[:heads])
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, dim))
    q, k, v = (random(rows, *size, seed=seed) for seed, size in enumerate(sizes))
    mine, theirs = pool_of(kv_heads, dim), pool_of(kv_heads, dim)
    expected = TorchNativeAttention(theirs).bind(batch).run(q, k, v, layer)
    plan = NativeAttention.of(mine)
    assert plan is not None
    unread = torch.ones(SLOTS, dtype=torch.bool)
    unread[attn_args_prefill(batch)[0].long()] = False
    mine.poison(unread.nonzero()[:, 0])
    found = plan.bind(batch).run(q, k, v, layer)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    read = ~unread
    assert torch.equal(mine.groups[0][:, :, read], theirs.groups[0][:, :, read])


@pytest.mark.usefixtures("kernels", "threads")
def test_columns_that_no_row_sees_may_hold_no_numbers() -> None:
    mask = trees([6, 6])
    mask.visible[:, :, 4:] = False  # as in a draft step: later columns are not written yet
    batch = batch_of([6, 6], [30, 50], mask)
    pool, clean = pool_of(2, 32), pool_of(2, 32)
    hidden = torch.cat([batch.req_to_token[i, n - 2 : n] for i, n in enumerate(batch.layout.kv_lens)]).long()
    pool.poison(hidden)
    batch = replace(batch, out_cache_loc=torch.zeros(12, dtype=torch.int64))
    q, k = random(12, 4, 32), torch.zeros(12, 2, 32)
    found = BoundNative.run(NativeAttention.of(pool).bind(batch), q, k, k, SPECS["plain"])
    assert torch.equal(found, NativeAttention.of(clean).bind(batch).run(q, k, k, SPECS["plain"]))
    assert found.isfinite().all()


BOUNDARIES = (0, 2, 3)


def decoder(dtype: torch.dtype, **flags: object) -> TargetModel:
    """A small random decoder, not packed."""
    sizes = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 72, "num_layers": 3, "num_heads": 4}
    config = ModelConfig(
        **{"num_kv_heads": 2, "head_dim": 16, "rope": RopeConfig(), **sizes, **flags},  # type: ignore[arg-type]
        architecture="LlamaForCausalLM",
        rms_norm_eps=1e-5,
        max_position=200,
        context_limit=(200, ""),
        dtype=dtype,
    )
    model, generator = TargetModel(config, 200), torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, view in model.weight_views():
            view.copy_(
                torch.randn(view.shape, generator=generator) * (0.1 if "norm" in name else 0.2) + ("norm" in name)
            )
    return model.to(dtype).requires_grad_(requires_grad=False).eval()


FLAGS = {
    "Llama": {},
    "whole vectors": {"intermediate_size": 128, "hidden_size": 64},
    "Qwen2": {"qkv_bias": True, "mlp_bias": True, "o_bias": True},
    "Qwen3": {"qk_norm": True, "head_dim": 48},
    "Mistral": {"windows": (7, 0, 20)},
    "sinks": {"windows": (7, 0, 20), "sinks": "all"},
    "heads of less than a vector": {"head_dim": 6},
    "heads of a vector and a part": {"head_dim": 18, "qk_norm": True},
    "OpenLLaMA": {"head_dim": 100},
    "Gemma 3": {
        **{"qk_norm": True, "norm_offset": 1.0, "output_norms": True, "activation": "gelu_tanh", "embed_scale": 6.9},
        **{"windows": (7, 0, 20), "local_rope": RopeConfig(theta=300.0), "attention_scale": 0.3},
    },
    "whole vectors of Gemma": {"intermediate_size": 128, "output_norms": True, "activation": "gelu_tanh"},
    "a rotated part": {"head_dim": 48, "qk_norm": True, "rope": RopeConfig(partial_rotary_factor=0.5)},
    "a part of no whole vectors": {"head_dim": 22, "rope": RopeConfig(partial_rotary_factor=0.3)},
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.usefixtures("kernels", "threads")
def test_one_call_computes_what_the_layers_of_torch_compute(flags: str, name: str) -> None:
    reference, model = decoder(torch.float32, **FLAGS[flags]), decoder(torch.float32, **FLAGS[flags])
    pack_linears(model)
    batch, rows = BATCHES[name], sum(BATCHES[name].layout.q_lens)
    tokens, positions = torch.arange(rows) % 50, torch.arange(rows)
    mine, theirs = (pool_of(2, model.config.head_dim, layers=3) for _ in range(2))
    expected = reference(tokens, positions, TorchNativeAttention(theirs).bind(batch), BOUNDARIES)
    bound = NativeAttention.of(mine).bind(batch)
    found = model(tokens, positions, bound, BOUNDARIES)
    torch.testing.assert_close(found.hidden, expected.hidden, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(found.aux, expected.aux, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(mine.groups[0], theirs.groups[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (4, 2, 18), (4, 2, 100), (7, 1, 16), (3, 3, 34)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("kernels", "threads")
def test_a_row_has_the_same_result_bit_for_bit_alone_in_a_batch_and_in_a_tree(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    model = decoder(dtype, qk_norm=True, windows=(9, 0, 30), sinks="all", **sizes)
    pack_linears(model)
    text = torch.arange(60) % 50
    table = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(4)).int()[:90].view(1, 90) + 1

    def forward(tokens: Tensor, start: int, mask: Causal | TreeMask, pool: KVPool, positions: Tensor) -> Tensor:
        count = len(tokens)
        layout = Layout((count,), (start + count,), None if isinstance(mask, Causal) else count)
        slots = table[0, start : start + count].long()
        batch = AttentionBatch(torch.tensor([0]), torch.tensor([start + count]), table, slots, mask, layout)
        return model(tokens, positions, NativeAttention.of(pool).bind(batch)).hidden

    alone = pool_of(kv_heads, dim, dtype, layers=3)
    one_by_one = [forward(text[i : i + 1], i, Causal(), alone, torch.tensor([i])) for i in range(60)]
    # Nodes 0, 2, 4 are the text; the odd ones are others' children, and stand between them.
    mask = torch.eye(6, dtype=torch.bool)
    for node, parent in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 4)):
        mask[node] |= mask[parent]
    depths = torch.tensor([[0, 1, 1, 2, 2, 3]])
    for prompt in (1, 47, 48, 49, 50):
        pool = pool_of(kv_heads, dim, dtype, layers=3)
        at_once = forward(text[:prompt], 0, Causal(), pool, torch.arange(prompt))
        assert torch.equal(torch.cat(one_by_one[:prompt]), at_once)
        tokens = torch.tensor([text[prompt], 7, text[prompt + 1], 8, text[prompt + 2], 9])
        tree = forward(tokens, prompt, TreeMask(mask[None], depths, depths), pool, prompt + depths[0])
        for node, place in ((0, prompt), (2, prompt + 1), (4, prompt + 2)):
            assert torch.equal(tree[node], one_by_one[place][0])


@pytest.mark.parametrize("vocab", [7, 64, 1003])
@pytest.mark.usefixtures("kernels", "threads")
def test_noise_draws_and_rankings_are_torchs(vocab: int) -> None:
    logits, keys, ids = 3 * random(9, vocab), torch.arange(9) // 3, torch.randperm(vocab)
    positions, temperature = torch.arange(9) // 2, torch.tensor([0.7, 0.7, 0.0] * 3)
    scoring = NativeScoring(logits, vocab, keys, positions, temperature, ids)
    noise = NativeScoring(None, vocab, keys, positions, ids=ids).noise()
    torch.testing.assert_close(noise, gumbel.variants["torch"](keys, positions, vocab, ids), atol=2e-6, rtol=2e-6)
    expected = torch.where(temperature[:, None] > 0, logits / temperature[:, None] + noise, logits)
    tokens, scores = scoring.draw()
    assert torch.equal(tokens, expected.argmax(1)) and torch.equal(scores, expected.amax(1))
    logp, best = scoring.topk(5)
    exact = expected.double().log_softmax(1).topk(5)
    assert torch.equal(best, exact.indices)
    torch.testing.assert_close(logp.double(), exact.values, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 processors")
@pytest.mark.parametrize("processor", ["skylake-avx512", "cascadelake", "alderlake", "znver3", "x86-64-v2"])
def test_the_kernels_are_cpp_for_every_processor(processor: str) -> None:
    """Branches that this machine's compiler never sees. Skylake's servers have AVX-512 without VNNI."""
    command = [
        build._compiler(),
        *build._FLAGS,
        f"-march={processor}",
        "-fsyntax-only",
        str(build.SOURCES / "kernels.cpp"),
    ]
    subprocess.run(command, check=True)


def test_without_a_compiler_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "library", library)
    library.cache_clear()
    native._compiles.cache_clear()
    try:
        assert not native.available(torch.device("cpu"), torch.float32)
        assert "there is no C++ compiler (Debian: apt-get install g++)" in caplog.text
        with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
            native.use_native("native")
    finally:
        monkeypatch.undo()
        library.cache_clear()
        native._compiles.cache_clear()
        native.use_native("auto")


V3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = f"{V3} avx512f avx512bw avx512vl avx512dq avx512cd"


@pytest.mark.parametrize(
    ("machine", "processor", "found"),
    [
        ("x86_64", f"{V4} avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", "amx"),
        ("x86_64", f"{V4} avx512_vnni avx512_bf16 amx_tile", "avx512_bf16"),
        ("x86_64", f"{V4} avx512_vnni", "avx512_vnni"),
        ("x86_64", V4, "avx2"),
        ("x86_64", f"{V3} sse4_2", "avx2"),
        ("x86_64", "avx2 fma f16c bmi2", "x86_64"),  # a virtual machine that hides the rest of x86-64-v3
        ("aarch64", "fp asimd atomics i8mm", "i8mm"),
        ("aarch64", "fp asimd", "aarch64"),
    ],
)
def test_without_a_compiler_the_best_library_that_was_built_serves(
    machine: str, processor: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setattr(build, "_processor", lambda: f"flags: {processor}")
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    for name in build.VARIANTS[machine]:
        (tmp_path / build._file_of(name)).touch()
        (tmp_path / f"{name}-0badc0de.so").touch()  # of other sources
    path = build._built_before()
    assert path == tmp_path / build._file_of(found)
    for name in build.VARIANTS[machine]:
        (tmp_path / build._file_of(name)).unlink()
    assert build._built_before() is None


@pytest.mark.deep
def test_a_library_that_was_built_before_is_loaded_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    has, variants = set(build._processor().split()), build._variants()
    name = next(name for name, variant in variants.items() if variant.needs <= has)
    monkeypatch.setattr(build, "BUILT", tmp_path)
    compile_kernels(tmp_path / build._file_of(name), variants[name].flags)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level("INFO"):
        assert build.library.__wrapped__().eagle_session_new is not None
    assert f"CPU kernels: {build._file_of(name)}, which was built before" in caplog.text
    assert "there is no C++ compiler" in caplog.text


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    model, tokens = decoder(torch.float32, **sizes), torch.arange(70) % 50
    pack_linears(model)
    batch, found = batch_of([60, 9, 1], [90, 60, 50], Causal()), []
    for number in (1, 2, 5):
        monkeypatch.setattr(native, "_threads", number)
        pool = pool_of(4, 64, layers=3)
        out = model(tokens, tokens, NativeAttention.of(pool).bind(batch), BOUNDARIES)
        found.append(torch.cat([out.hidden, out.aux, model.logits(out.hidden)], dim=1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_positions_and_slots_that_do_not_exist_are_refused() -> None:
    model, tokens = decoder(torch.float32), torch.arange(3)
    pack_linears(model)
    batch = BATCHES["decode"]
    with pytest.raises(IndexError, match="beyond"):
        model(tokens, tokens + 198, NativeAttention.of(pool_of(2, 16, layers=3)).bind(batch))
    outside = replace(batch, out_cache_loc=batch.out_cache_loc + SLOTS)
    with pytest.raises(IndexError, match="beyond"):
        model(tokens, tokens, NativeAttention.of(pool_of(2, 16, layers=3)).bind(outside))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_no_number_stays_none(quantization: Quantization) -> None:
    packed = NativeWeight(quantize(random(32, 64), quantization))
    x = random(2, 64)
    x[0, 3] = float("nan")
    y = native_linear(x, packed, None)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()
    with pytest.raises(ValueError, match="infinite or NaN"):
        quantize(random(4, 8) / 0, quantization)
