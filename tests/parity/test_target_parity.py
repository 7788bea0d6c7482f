"""Target logits against transformers, in float32, for every family, RoPE type and attention variant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from eagle_server.attention.batches import prefill_batch
from eagle_server.attention.dense import DenseCausal
from eagle_server.attention.interface import BoundAttention, Causal, LayerSpec, Layout
from eagle_server.attention.recurrent import DenseRows, PromptRows
from eagle_server.attention.torch_native import torch_native
from eagle_server.engine.assembly.pools import make_pool, make_states
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config_json import read_config
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import FAMILIES, read_target_config
from eagle_server.ops.recurrent.nodes import RecurrentLayer
from tests.parity.checkpoints import CASES, VOCAB, write
from tests.parity.checkpoints import FAMILIES as THEIRS
from tests.support.mimo_v2 import write_xiaomis_config
from tests.support.step3p5 import write_stepfuns_config

TOLERANCE = 1e-4
RECURRENT_TOLERANCE = 5e-4  # in float64, embeddings changed by 6e-8 of themselves move such logits by 1.5e-4
PAGE = 16
HYBRIDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "granite-hybrid", "lfm2", "lfm2-moe", "kimi-linear")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=sorted(CASES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, TargetModel]:
    directory = tmp_path_factory.mktemp("target")
    theirs = write(CASES[request.param], directory)
    return theirs, load_target(directory, Loading(progress=False), dtype="float32")


class DenseWindows(BoundAttention):
    """`BoundAttention`: dense causal attention, with a mask for each layer's sliding window."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, q: Tensor, layer: LayerSpec) -> Tensor:
        return self.run(q, *self.kv[layer.index], layer)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        self.kv[layer.index] = k, v
        distance = torch.arange(self.length)[:, None] - torch.arange(self.length)
        seen = (distance >= 0) & (distance < (layer.sliding_window or self.length))
        bias = torch.zeros(self.length, self.length).masked_fill(~seen, float("-inf"))
        return DenseCausal(self.batch, bias).run(q, k, v, layer)

    def recur(self, x: Tensor, gates: Tensor, layer: RecurrentLayer) -> Tensor:
        return DenseRows(self.batch).run(x, gates, layer)


class Pages:
    """Requests over a paged KV pool with shuffled pages. Slots and states that are not written hold NaN."""

    def __init__(self, model: TargetModel, requests: int, pages_each: int) -> None:
        pages = 1 + requests * pages_each
        self.pool = make_pool(model.config, pages * PAGE, torch.device("cpu"))
        self.pool.poison(torch.arange(PAGE, pages * PAGE))
        self.states = make_states(model.config, requests, 1, torch.device("cpu"))
        if self.states is not None:
            self.states.poison()
        order = 1 + torch.randperm(pages - 1).view(requests, pages_each)
        self.slots = (order[:, :, None] * PAGE + torch.arange(PAGE)).view(requests, -1)  # [requests, positions]
        self.model, self.attention = model, torch_native(self.pool)

    def logits(self, prompts: Sequence[Tensor], start: Sequence[int], stop: Sequence[int]) -> list[Tensor]:
        """The logits of one forward over tokens start..stop of every prompt."""
        spans = [torch.arange(a, b) for a, b in zip(start, stop, strict=True)]
        lens = [len(span) for span in spans]
        rows, layout = torch.arange(len(prompts)), Layout(tuple(lens), tuple(stop))
        batch = prefill_batch(rows, torch.tensor(stop), self.slots.int(), Causal(), layout)
        if self.states is not None:
            chunks = list(zip(range(len(prompts)), start, lens, strict=True))
            batch = replace(batch, recurrent=PromptRows(self.states, chunks))
        tokens = torch.cat([prompt[span] for prompt, span in zip(prompts, spans, strict=True)])
        output = self.model(tokens, torch.cat(spans), self.attention.plan(layout).bind(batch))
        return list(self.model.logits(output.hidden).split(lens))


def test_every_native_family_has_a_case() -> None:
    assert {family.architecture for family in FAMILIES} == {model.__name__ for _, model in THEIRS.values()}
    assert {family.model_type for family in FAMILIES} == {config.model_type for config, _ in THEIRS.values()}
    assert {case.family for case in CASES.values()} == set(THEIRS)


@torch.inference_mode()
def test_dense_logits_equal_transformers(pair: tuple[PreTrainedModel, TargetModel]) -> None:
    theirs, ours = pair
    tokens = torch.randint(VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(30).repeat(2)
    logits = ours.logits(ours(tokens.view(-1), positions, DenseWindows(2, 30)).hidden)
    tolerance = TOLERANCE if ours.config.recurrent is None else RECURRENT_TOLERANCE
    torch.testing.assert_close(logits.view(2, 30, -1), theirs(tokens).logits, atol=tolerance, rtol=0)


@torch.inference_mode()
def test_paged_logits_of_unequal_prompts_equal_transformers(pair: tuple[PreTrainedModel, TargetModel]) -> None:
    """Prompts shorter than, equal to and longer than a page of 16, in two chunks and then one token each."""
    theirs, ours = pair
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (n,), generator=generator) for n in (5, 16, 17, 45)]
    lens = [len(prompt) for prompt in prompts]
    middle, last = [n // 2 for n in lens], [n - 1 for n in lens]
    pages = Pages(ours, len(prompts), 3)
    steps = [([0] * 4, middle), (middle, last), (last, lens)]
    chunks = [pages.logits(prompts, start, stop) for start, stop in steps]
    tolerance = TOLERANCE if ours.config.recurrent is None else RECURRENT_TOLERANCE
    for prompt, *parts in zip(prompts, *chunks, strict=True):
        expected = theirs(prompt[None]).logits[0]
        torch.testing.assert_close(torch.cat(parts), expected, atol=tolerance, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("length", [20, 64])
def test_dynamic_rope_is_that_of_the_served_context(tmp_path: Path, length: int) -> None:
    """Trained for 32 positions. After them transformers' base depends on the length, and ours on the context."""
    theirs = write(CASES["llama-dynamic"], tmp_path, max_position_embeddings=32)
    ours = load_target(tmp_path, Loading(context=length, lookahead=17, progress=False), dtype="float32")
    tokens = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(3))
    output = ours(tokens[0], torch.arange(length), DenseCausal(1))
    torch.testing.assert_close(ours.logits(output.hidden), theirs(tokens).logits[0], atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_aux_boundaries_are_the_residual_streams_of_transformers(tmp_path: Path) -> None:
    """hidden_states[b] of transformers is the stream after b layers. Its last entry is after the final norm."""
    theirs = write(CASES["llama"], tmp_path)
    ours = load_target(tmp_path, Loading(progress=False), dtype="float32")
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    output = ours(tokens[0], torch.arange(9), DenseCausal(1), (0, 2))
    states = theirs(tokens, output_hidden_states=True).hidden_states
    assert output.aux is not None
    torch.testing.assert_close(output.aux, torch.cat([states[0], states[2]], -1)[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(output.hidden, states[-1][0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-keys-are-values"])
def test_config_of_google_means_the_same(tmp_path: Path, name: str) -> None:
    """Sizes of global layers by names of their own, and projections of keys in layers that write none."""
    write(CASES[name], tmp_path)
    new, sizes = read_config(tmp_path), CASES[name].settings
    old = {key: value for key, value in new.items() if key not in ("per_layer_config", "rope_parameters")}
    old |= {key: sizes.get(key) for key in ("global_head_dim", "num_global_key_value_heads")}
    assert read_target_config(old) == read_target_config(new)
    (tmp_path / "config.json").write_text(json.dumps(old))
    file = tmp_path / "model.safetensors"
    parts = ("k_proj", "v_proj", "k_norm") if name == "gemma4" else ()
    unread = {f"model.layers.5.self_attn.{part}.weight": torch.ones(3) for part in parts}
    save_file({**unread, **load_file(file)}, file)
    assert load_target(tmp_path, Loading(progress=False), dtype="float32").is_fused


def test_config_of_xiaomi_means_the_same(tmp_path: Path) -> None:
    write(CASES["mimo-v2"], tmp_path)
    new = read_target_config(read_config(tmp_path))
    write_xiaomis_config(tmp_path)
    assert read_target_config(read_config(tmp_path)) == new


def test_config_of_stepfun_means_the_same(tmp_path: Path) -> None:
    write(CASES["step3p5"], tmp_path)
    new = read_target_config(read_config(tmp_path))
    write_stepfuns_config(tmp_path)
    assert read_target_config(read_config(tmp_path)) == new


OWN_CONFIGS = ("gemma4", "mimo-v2", "step3p5")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.family not in OWN_CONFIGS])
def test_config_of_transformers_4_means_the_same(tmp_path: Path, name: str) -> None:
    """Without rope_parameters, dtype and layer_types of attention alone, which transformers 5 writes."""
    write(CASES[name], tmp_path)
    new = read_config(tmp_path)
    keeps = CASES[name].family in HYBRIDS
    later = {"rope_parameters", "dtype"} | (set() if keeps else {"layer_types"})
    old = {key: value for key, value in new.items() if key not in later}
    rope = dict(new.get("rope_parameters", {"rope_type": "default", "rope_theta": None}))
    if "sliding_attention" in rope:  # one RoPE per layer type
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = 1 + new["layer_types"].index("full_attention")
        rope = dict(rope["full_attention"])
    old["rope_theta"], old["torch_dtype"] = rope.pop("rope_theta"), new["dtype"]
    old["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    assert read_target_config(old) == read_target_config(new)
