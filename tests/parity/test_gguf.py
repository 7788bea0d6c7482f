"""GGUF files: tensors are those of the checkpoint that was written, bit for bit, and texts are the directory's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quants
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle_server.__main__ import _dry_run
from eagle_server.config import DEMO_DRAFT, DEMO_TARGET, parse_args
from eagle_server.engine.assembly.from_config import with_directory
from eagle_server.llm import LLM
from eagle_server.models.checkpoints.gguf import directory as module
from eagle_server.models.checkpoints.gguf.directory import directory_of
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.weights import open_weights
from eagle_server.models.config import CheckpointError
from eagle_server.models.layers import Linear
from eagle_server.ops.native.build import BuildError
from eagle_server.text.tokenizer import load_tokenizer
from tests.parity.checkpoints import CASES, write
from tests.parity.gguf_checkpoints import assert_speculates_losslessly, checkpoint, logits, opened, own_cache
from tests.support.engines import CONTEXT, MARGIN
from tests.support.gguf_files import write_gguf
from tests.support.gguf_heads import write_head
from tests.support.k_quants import K_QUANTS, k_quantized

FAMILIES = ["llama", "llama-tied", "llama-biases-of-attention", "qwen2", "qwen3", "qwen3-moe"]
__all__ = ["own_cache"]
pytestmark = pytest.mark.usefixtures("own_cache")
KINDS = ["BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_and_logits_are_the_directorys(name: str, tmp_path: Path) -> None:
    source = checkpoint(name, tmp_path / "source")
    directory = opened(source)
    stored, expected = open_weights(directory), load_file(source / "model.safetensors")
    assert set(stored) == set(expected)
    assert all(torch.equal(stored[key].read(), tensor) for key, tensor in expected.items())
    assert torch.equal(logits(directory), logits(source))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gemma_3_has_the_logits_of_its_directory(kind: str, tmp_path: Path) -> None:
    """Its norms are stored plus 1, which float32 rounds."""
    source = checkpoint("gemma3", tmp_path / "source", query_pre_attn_scalar=32)
    directory = opened(source, kind)
    stored, expected = open_weights(directory), load_file(source / "model.safetensors")
    assert set(stored) == set(expected)
    for name in (name for name in expected if "norm" in name):
        torch.testing.assert_close(stored[name].read(), expected[name], atol=1e-6, rtol=0)
    error = (logits(directory) - logits(source)).norm() / logits(source).norm()
    assert error < {"F32": 1e-5, "Q8_0": 0.1}[kind]
    target: Any = load_target(directory, Loading(context=CONTEXT, lookahead=MARGIN, progress=False), dtype="bfloat16")
    assert_speculates_losslessly(target)


def test_llama_3s_frequencies_are_those_of_the_file(tmp_path: Path) -> None:
    source = checkpoint("llama-llama3", tmp_path / "source")
    target: Any = load_target(source, Loading(progress=False), dtype="float32")
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    usual = rope["rope_theta"] ** (-torch.arange(0, target.config.head_dim, 2) / target.config.head_dim)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = write(CASES["llama-llama3"], tmp_path / "again").config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    directory = opened(source, more={"rope_freqs.weight": (usual / scaled).numpy()})
    torch.testing.assert_close(logits(directory), logits(source), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [*KINDS, *K_QUANTS])
def test_every_type_is_read_as_the_package_reads_it(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = checkpoint("llama-wide" if kind in K_QUANTS else "llama", tmp_path / "source")
    directory = opened(source, kind)
    stored, quantized = open_weights(directory), GGMLQuantizationType[kind]
    for name, tensor in load_file(source / "model.safetensors").items():
        expected = tensor
        if tensor.dim() > 1:  # rounding by rows does not depend on their order
            array = tensor.numpy()
            blocks = k_quantized(array, kind) if kind in K_QUANTS else quants.quantize(array, quantized)
            expected = torch.from_numpy(dequantize(blocks, quantized))
        assert torch.equal(stored[name].read().float(), expected), name
    for pack in (True, False):  # every start says how it is computed
        caplog.clear()
        with caplog.at_level(logging.INFO):
            load_target(directory, Loading(progress=False, pack=pack))
        in_blocks, as_it_is = kind not in ("BF16", "F16"), pack or kind == "Q4_0"
        assert (f"weights in {kind} are computed as they are" in caplog.text) == (in_blocks and as_it_is)
        assert (f"weights in {kind} are multiplied out to 16 bits" in caplog.text) == (in_blocks and not as_it_is)


MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "Q4_K", "output.weight": "Q6_K"}  # a file named Q4_K_M


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M"])
@pytest.mark.parametrize("name", ["llama-wide", "llama-wide-tied", "qwen3-wide"])
def test_blocks_are_computed_as_they_are(name: str, kind: str, tmp_path: Path) -> None:
    """Beside float32 arithmetic on the same weights, logits are as near as the file's are to those before its rounding.

    Inputs are rounded to 8 bits, as Q8_0's weights are. Speculative texts are plain ones, bit for bit.
    """
    source = checkpoint(name, tmp_path / "source")
    directory = opened(source, "Q4_K", kinds=MIXED) if kind == "Q4_K_M" else opened(source, kind)
    exact, original = logits(directory), logits(source)
    near = logits(directory, pack=True)
    assert (near - exact).norm() < 1.2 * (exact - original).norm()
    assert (near - exact).norm() < 0.1 * exact.norm()
    target: Any = load_target(directory, Loading(context=CONTEXT, lookahead=MARGIN, progress=False), dtype="bfloat16")
    linears = [module for module in target.modules() if isinstance(module, Linear)]
    assert target.is_fused
    for linear in linears:  # lm_head too; its 131 outputs are 144 with padding
        assert 8 * linear.nbytes / sum(rows for _, rows in linear.parts) / linear.weight.shape[1] < 10
    assert_speculates_losslessly(target)


def test_blocks_of_experts_are_computed_as_they_are(tmp_path: Path) -> None:
    """Gates and up-projections of two types, one expert after the other."""
    source = checkpoint("qwen3-moe", tmp_path / "source", norm_topk_prob=True, moe_intermediate_size=64)
    directory = opened(source, "Q8_0", kinds={"ffn_gate_inp": "F32", "ffn_up_exps": "Q5_0"})
    target: Any = load_target(directory, Loading(context=CONTEXT, lookahead=MARGIN, progress=False), dtype="bfloat16")
    experts = target.layers[0].mlp.experts
    assert target.is_fused and experts.gate_up.nbytes < 0.5 * 2 * experts.gate_up.native[0].dense().numel()
    exact, near = logits(directory), logits(directory, pack=True)
    assert (near - exact).norm() < 0.1 * exact.norm()
    assert_speculates_losslessly(target)


def test_blocks_stay_where_a_rounding_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And are not kept in a cache: they are in the file."""
    directory = opened(checkpoint("llama", tmp_path / "source"), "Q8_0")
    how = Loading(progress=False, quantization="int4")
    with caplog.at_level(logging.WARNING):
        target: Any = load_target(directory, how, quantization_cache=tmp_path / "kept")
    assert target.layers[0].mlp.down.native[0].quantization is None
    assert "--quantization int4 rounds its other layers only" in caplog.text
    assert "weights in the blocks of a GGUF file are not kept" in caplog.text
    assert not [*(tmp_path / "kept").iterdir()]


def test_parts_that_cannot_be_packed_together_are_multiplied_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = checkpoint("llama", tmp_path / "source", num_attention_heads=4, num_key_value_heads=1, head_dim=24)
    directory = opened(source, "Q8_0", kinds={"attn_k": "Q5_0"})
    with caplog.at_level(logging.WARNING):
        target: Any = load_target(directory, Loading(progress=False))
    assert "model.layers.0.self_attn.v_proj.weight: multiplied out: 16 outputs have several types" in caplog.text
    assert target.layers[0].attention.qkv.native[0].scales is None and "mlp" not in caplog.text


def test_the_demo_has_its_text_with_its_head(tmp_path: Path) -> None:
    """The file alone in a directory, beside the tokenizer."""
    (tmp_path / "tokenizer.json").write_text((DEMO_TARGET / "tokenizer.json").read_text())
    write_gguf(DEMO_TARGET, tmp_path / "demo.gguf")
    asked: dict[str, Any] = {"max_tokens": 32, "temperature": 0, "use_tqdm": False}
    expected = LLM(progress=False, max_total_tokens=2048).generate("def area(radius):\n", **asked)
    (tmp_path / "head").mkdir()
    head = write_head(DEMO_DRAFT, tmp_path / "head" / "head.gguf", "Q8_0")
    for path, draft in ((tmp_path / "demo.gguf", DEMO_DRAFT), (tmp_path, head), (tmp_path, head.parent)):
        llm = LLM(str(path), speculative_draft_model_path=str(draft), max_total_tokens=2048, progress=False)
        found = llm.generate("def area(radius):\n", **asked)
        assert found[0].outputs[0].text == expected[0].outputs[0].text


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_file_in_parts_has_the_logits_of_one_file(kind: str, tmp_path: Path) -> None:
    """Any part names the whole, and so does the directory."""
    source = checkpoint("llama-llama3", tmp_path / "source")
    whole = opened(source, kind)
    (tmp_path / "parts").mkdir()
    first = write_gguf(source, tmp_path / "parts" / "m.gguf", kind, tensors_of_part=5)
    (tmp_path / "parts" / "tokenizer.json").write_text((DEMO_TARGET / "tokenizer.json").read_text())
    files = sorted(first.parent.glob("*.gguf"))
    assert first == files[0] and len(files) > 2
    assert directory_of(files[2]) == directory_of(first)
    assert torch.equal(logits(directory_of(first)), logits(whole))
    config = parse_args(["--model-path", str(first.parent), "--device", "cpu"], environ={})
    assert config.gguf == first and config.served_model_name == "m"
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"parts, of which m-00002-of-\d+\.gguf is missing"):
        directory_of(first)


def test_options_and_a_dry_run_take_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint("llama", tmp_path / "source")
    file = write_gguf(source, tmp_path / "toy.Q4_0.gguf", "Q4_0")
    (tmp_path / "tokenizer.json").write_text((DEMO_TARGET / "tokenizer.json").read_text())
    config = parse_args(["--model-path", str(file), "--device", "cpu"], environ={})
    assert with_directory(config).served_model_name == config.served_model_name == "toy.Q4_0"
    assert _dry_run(config)["memory"]["fits"] is True
    with pytest.raises(SystemExit):
        parse_args(["--model-path", str(tmp_path / "other.gguf")], environ={})
    assert "no such directory or GGUF file" in capsys.readouterr().err


def test_the_directory_is_made_once_and_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint("llama", tmp_path / "source")
    first = opened(source)
    made = (first / "gguf.json").stat().st_mtime_ns
    file = tmp_path / "gguf" / "model-F32.gguf"
    assert directory_of(file) == first and (first / "gguf.json").stat().st_mtime_ns == made
    (tmp_path / "gguf" / "generation_config.json").write_text('{"eos_token_id": 7}')
    second = directory_of(file)
    assert second != first and json.loads((second / "generation_config.json").read_text()) == {"eos_token_id": 7}
    write_gguf(source, file, "BF16")
    assert directory_of(file) not in (first, second)
    monkeypatch.setattr(module, "CACHE", Path("/proc/none/kernels"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    assert directory_of(file).is_relative_to(tmp_path / "tmp")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: "/proc/none")
    with pytest.raises(CheckpointError, match="can be written"):
        directory_of(file)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Whoever may write it could have any model served."""
    kept = module.CACHE.with_name("gguf")
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    with pytest.raises(BuildError, match="others may write it: remove it"):
        opened(checkpoint("llama", tmp_path / "source"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"values": {"general.architecture": "mamba"}}, "architecture mamba is not supported in GGUF; supported are"),
        ({"values": {"attention.head_count": None}}, "llama.attention.head_count is missing"),
        ({"values": {"rope.scaling.type": "other"}}, "rope.scaling.type other is not supported"),
        ({"values": {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5}}, "attn_factor: only 1.0 is"),
        ({"values": {"split.count": 2}}, "one of 2 parts; name it"),
        ({"more": {"blk.0.attn_sinks.weight": torch.ones(4).numpy()}}, "blk.0.attn_sinks.weight is not known"),
        ({"more": {"blk.0.ffn_up_exps.weight": torch.ones(2, 4, 4).numpy()}}, "experts in the architecture llama"),
        ({"more": {"rope_freqs.weight": torch.zeros(8).numpy()}}, "positive numbers are expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_named(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = checkpoint("llama", tmp_path / "source")
    with pytest.raises(CheckpointError, match=reason):
        opened(source, **given)
    assert not [*(module.CACHE.parent / "gguf").iterdir()]  # nothing is left of it


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.gguf: not a readable GGUF file"):
        directory_of(tmp_path / "x.gguf")


def test_a_file_that_ends_too_soon_is_named(tmp_path: Path) -> None:
    file = write_gguf(checkpoint("llama", tmp_path / "source"), tmp_path / "x.gguf")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"x\.gguf: (ends before its tensors do|not a readable)"):
        directory_of(file)


def test_a_file_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    source = checkpoint("llama", tmp_path / "source")
    file = write_gguf(source, tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"put the model's tokenizer\.json beside the file, or name it"):
        directory_of(file)
    config = parse_args(["--model-path", str(file), "--tokenizer-path", str(DEMO_TARGET)], environ={})
    assert (Path(with_directory(config).target_path) / "config.json").is_file()
    unknown = {"pre": "new", "tokens": ["a", "b"], "types": [1, 1], "merges": []}
    with pytest.raises(CheckpointError, match=r"how its tokenizer splits texts \(new\) is not known"):
        directory_of(write_gguf(source, tmp_path / "y.gguf", tokenizer=unknown))


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "Hello, world! It's 2026.",
    "  spaces\n\nand\ttabs ",
    "ÄÖÜ ß 中文 😀",
    "<|im_start|>user\nhi<|im_end|>",
    "a1b22c333",
]


@pytest.mark.parametrize(
    ("case", "pre", "split"),
    [("qwen2", "qwen2", QWEN2), ("gpt-oss", "gpt-4o", GPT_4O), ("qwen3-next", "qwen2", QWEN2)],
    ids=["qwen2", "gpt-oss", "qwen3-next"],
)
def test_the_tokenizer_of_the_file_is_the_original(case: str, pre: str, split: str, tmp_path: Path) -> None:
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    original.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    original.train_from_iterator([*TEXTS, "hello user spaces and tabs world"] * 4, trainer)
    state = json.loads(original.to_str())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    source = tmp_path / "source"
    write(CASES[case], source, vocab_size=len(tokens), eos_token_id=1)
    described = {
        "pre": pre,
        "tokens": tokens,
        "types": [3 if token in special else 1 for token in tokens],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]],
    }
    directory = directory_of(
        write_gguf(
            source, tmp_path / "x.gguf", tokenizer=described, values={"tokenizer.chat_template": "{{ messages }}"}
        )
    )
    found = load_tokenizer(str(directory))
    for text in TEXTS:
        assert found.encode(text, special=False) == original.encode(text, add_special_tokens=False).ids
        assert found.decode(found.encode(text, special=False), special=True) == text
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": [1]}
    assert (directory / "chat_template.jinja").read_text() == "{{ messages }}"
