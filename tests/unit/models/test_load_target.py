"""Targets load strictly, with clear errors. Packing and export keep all numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.checkpoints.weights import resolve_file
from eagle_server.models.config import CheckpointError
from eagle_server.models.layers import Linear
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_server.ops.linear.packed import computed_rows, pack_weight, packed_linear, unpack_weight

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "target")


def checkpoint(directory: Path, **settings: Any) -> Path:
    """A random checkpoint of CONFIG with `settings`."""
    torch.manual_seed(0)
    raw = {**CONFIG, **settings}
    model = TargetModel(read_target_config(raw), 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    save_checkpoint(model, directory, raw, torch.float32)
    return directory


def logits(model: TargetModel, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
    output = model(torch.arange(9), torch.arange(9), DenseCausal(1))
    assert output.hidden.dtype == dtype
    return model.logits(output.hidden, out)


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


ERRORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight"),
    "missing head": (lambda t: t.pop("lm_head.weight"), "missing tensors: lm_head.weight"),
    "unexpected": (lambda t: t.update(extra=torch.ones(1)), "model.safetensors: unexpected tensors: extra"),
    "bias": (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}), "q_proj.bias"),
    "shape": (
        lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(48, 31)}),
        r"model.safetensors: model.layers.1.mlp.up_proj.weight: expected shape \[48, 32\], found \[48, 31\]",
    ),
    "kind": (lambda t: t.update({"model.norm.weight": torch.ones(32).int()}), "expected 16- or 32-bit.*int32"),
    "float8": (lambda t: t.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}), "found .*float8"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_inexact_checkpoint_is_refused(directory: Path, name: str) -> None:
    change, message = ERRORS[name]
    edit(directory, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_target(directory, Loading(progress=False))
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "'MambaForCausalLM' cannot be served"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq with None bits in groups of 128 is not supported"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, found None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope type 'longrope'"),
        ({"head_dim": "8"}, "head_dim must be a positive integer, found '8'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, found 0"),
        ({"num_attention_heads": 5, "head_dim": 8}, "num_attention_heads 5 is no multiple of num_key_value_heads 2"),
        ({"max_position_embeddings": -4}, "max_position_embeddings must be a positive integer, found -4"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, found '1e-5'"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive number, found '1e4'"),
        ({"rope_parameters": [1]}, "rope_parameters and rope_scaling must be objects"),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer or a list of integers, found '2'"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be an integer or a list of integers"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list, found 'LlamaForCausalLM'"),
    ],
)
def test_unsupported_config_is_refused(directory: Path, settings: dict[str, Any], message: str) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    with pytest.raises(CheckpointError, match=message):
        load_target(directory, Loading(progress=False))


def test_inert_tensors_are_ignored(directory: Path) -> None:
    expected = logits(load_target(directory, Loading(progress=False)))
    edit(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(logits(load_target(directory, Loading(progress=False))), expected)


def test_tied_head_is_stored_as_a_copy_or_used_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = checkpoint(tmp_path, tie_word_embeddings=True)
    expected = logits(load_target(directory, Loading(progress=False)))
    edit(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load_target(directory, Loading(progress=False))), expected)
    assert not caplog.text
    edit(directory, lambda t: t["lm_head.weight"].mul_(2))  # transformers, too, does not tie these
    model = load_target(directory, Loading(progress=False))
    assert "tie_word_embeddings is true, but lm_head.weight is not" in caplog.text
    assert not model.config.tie_word_embeddings
    torch.testing.assert_close(logits(model), 2 * expected)


@pytest.mark.parametrize(
    ("true", "declared", "warning"),
    [
        ({"num_key_value_heads": 2}, {"num_key_value_heads": 4}, "num_key_value_heads is 4, but the files hold 2"),
        ({"num_key_value_heads": 1}, {"num_key_value_heads": None}, ""),
        ({"head_dim": 16}, {"head_dim": None}, ""),
        ({"head_dim": 16, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, {"head_dim": None}, ""),
    ],
    ids=["KV heads", "KV heads absent", "head size absent", "head size of Qwen3 absent"],
)
def test_attention_follows_the_tensors(
    tmp_path: Path, true: dict[str, Any], declared: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint(tmp_path, **true)
    right = load_target(directory, Loading(progress=False))
    (directory / "config.json").write_text(json.dumps({**CONFIG, **true, **declared}))
    found = load_target(directory, Loading(progress=False))
    assert found.config == right.config
    assert torch.equal(logits(found), logits(right))
    assert (warning in caplog.text) if warning else not caplog.text


def test_declared_head_size_is_not_replaced(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "head_dim": 16}))
    with pytest.raises(CheckpointError, match=r"q_proj.weight: expected shape \[64, 32\], found \[32, 32\]"):
        load_target(directory, Loading(progress=False))


def test_missing_files_are_named(directory: Path, tmp_path: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a readable safetensors file"):
        load_target(directory, Loading(progress=False))
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model.safetensors"):
        load_target(directory, Loading(progress=False))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names model-00001-of-00001.safetensors, which is not there"):
        load_target(directory, Loading(progress=False))
    for content in ('{"weight_map": ["a"]}', "[1]", '{"weight_map": {"a": 3}}', "{}", "no JSON"):
        (directory / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"index.json: a JSON object with a weight_map from tensors to files"):
            load_target(directory, Loading(progress=False))
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json here"):
        load_target(directory, Loading(progress=False))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/place", "/no/such/place: no such directory"),
        ("./models/mine", "no such directory"),
        (Path("models/mine"), "no such directory"),
        ("a/b/c", "no such directory"),
        ("someone/some-model", "no such directory, and the model is not in the cache .*, and HF_HUB_OFFLINE is set"),
        ("not a repository", "not a repository: https://huggingface.co refuses: Repo id must"),
    ],
)
def test_unknown_name_says_where_it_was_searched(name: str | Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_target(name, Loading(progress=False))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("freq.pt", "no such file"),
        ("./a/b/freq.pt", "no such file"),
        ("owner/model/freq.pt", "owner/model: no such directory, and freq.pt is not in the cache"),
    ],
)
def test_unknown_file_says_where_it_was_searched(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_file(name)


def test_file_instead_of_directory_is_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint directory is expected, this is a file"):
        load_target(directory / "config.json", Loading(progress=False))


@pytest.mark.parametrize(
    ("stored", "asked", "served"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_dtype_is_the_checkpoints_or_the_one_asked_for(
    tmp_path: Path, stored: str, asked: Any, served: torch.dtype
) -> None:
    source = load_target(checkpoint(tmp_path / "float32"), Loading(progress=False))
    save_checkpoint(source, tmp_path / stored, CONFIG, getattr(torch, stored))
    model = load_target(tmp_path / stored, Loading(progress=False), dtype=asked)
    assert model.config.dtype == served
    assert {p.dtype for p in model.parameters()} == {served}
    found = logits(model, served)
    assert found.dtype == model.logits_dtype
    written = torch.empty_like(found)
    assert torch.equal(logits(model, served, written), found)
    assert torch.equal(written, found)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("more", "ids"), [([3, 5], (3, 5)), (7, (3, 7)), (None, (3,))])
def test_generation_config_adds_end_of_sequence_ids(tmp_path: Path, more: object, ids: tuple[int, ...]) -> None:
    directory = checkpoint(tmp_path, eos_token_id=3)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    assert load_target(directory, Loading(progress=False)).config.eos_token_ids == ids


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"eos_token_id": [1, "2"]}', "[1]", "no JSON"])
def test_bad_generation_config_is_refused(directory: Path, content: str) -> None:
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config.json: (eos_token_id must be|a JSON object)"):
        load_target(directory, Loading(progress=False))


@pytest.mark.parametrize("size", [0, 50, -1000])
def test_truncated_file_is_refused_in_one_line(directory: Path, size: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a readable safetensors file") as caught:
        load_target(directory, Loading(progress=False))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_named_with_the_command_that_fetches_the_weights(directory: Path, name: str) -> None:
    (directory / "model.safetensors").unlink()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 4976698672\n"
    (directory / name).write_text(pointer)
    if "00001" in name:
        index = {"weight_map": {"model.norm.weight": name}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{name}: a Git LFS pointer, .* git lfs pull") as caught:
        load_target(directory, Loading(progress=False))
    assert "\n" not in str(caught.value)


def test_context_sizes_the_rope_table(directory: Path) -> None:
    assert load_target(directory, Loading(progress=False)).rope.cos.shape[0] == 64
    assert load_target(directory, Loading(context=200, progress=False)).rope.cos.shape[0] == 200


@pytest.mark.parametrize("pack", [True, False])
def test_saved_checkpoint_loads_bit_for_bit(directory: Path, tmp_path: Path, pack: bool) -> None:
    model = load_target(directory, Loading(progress=False, pack=pack))
    save_checkpoint(model, tmp_path / "copy", CONFIG, torch.float32)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows_out", "rows_in"), [(7, 5), (64, 33), (1025, 513)])
def test_packed_linear_equals_the_plain_one(dtype: torch.dtype, rows_out: int, rows_in: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(rows_out, rows_in, dtype=dtype), torch.randn(rows_out, dtype=dtype)
    packed = pack_weight(weight)
    assert torch.equal(unpack_weight(packed), weight)
    for rows in (1, 2, 17, 33, 257, 513):  # the last three are padded
        x = torch.randn(rows, rows_in, dtype=dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        found = packed_linear(x, packed, bias).double()
        tolerance = (2e-6 if dtype == torch.float32 else 2e-2) * float(expected.abs().max())
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def test_batches_of_any_size_are_computed_in_few_sizes() -> None:
    counts = {rows: computed_rows(rows) for rows in range(1, 2049)}
    assert all(rows <= count <= 1.25 * rows for rows, count in counts.items())
    assert len(set(counts.values())) < 100  # with about ten weight shapes this fits in oneDNN's cache


def test_packing_drops_a_large_plain_weight_and_can_restore_it() -> None:
    linear = Linear(1024, [("a", 700), ("b", 324)])
    with torch.no_grad():
        linear.weight.normal_()
    weight = linear.weight.detach().clone()
    linear.pack()
    assert linear.weight.numel() == 0 or not torch.backends.mkldnn.is_available()
    assert torch.equal(linear.dense_weight(), weight)
    assert torch.equal(dict(linear.weight_views(""))["b.weight"], weight[700:])
