"""Text of checkpoints that read images too: logits and texts are those of transformers' whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from eagle_server.config import DEMO_TARGET, ConfigError, parse_args
from eagle_server.engine.assembly.memory_estimate import memory_estimate
from eagle_server.engine.assembly.resolve import context_length
from eagle_server.llm import LLM
from eagle_server.models.checkpoints import weights
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target, read_model_config
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.targets.decoder import TargetModel
from tests.parity.test_mtp_parity import check_greedy_chain, mtp_of, save_beside
from tests.parity.test_quantized_checkpoints import as_gptq, as_int8, as_packed, compressed, gptq
from tests.parity.test_target_parity import TOLERANCE, Pages
from tests.parity.test_transformers_target import generated
from tests.parity.wrappers import CASES, MEDIA, VOCAB, rename, write
from tests.support.engines import CONTEXT, MARGIN, plain, random_head, request, run, speculative, tokens_of

DEEP, QUICK = pytest.mark.deep, {"qwen2.5-vl", "gemma3"}
ALL = [pytest.param(name, marks=() if name in QUICK else (pytest.mark.deep,)) for name in CASES]
NGRAM = {"steps": 0, "topk": 1, "ngram_steps": 4, "nodes": 8}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


def load(directory: Path, **settings: Any) -> Any:
    how = Loading(context=CONTEXT, lookahead=MARGIN, progress=False, **settings)
    return load_target(directory, how, dtype="float32")


def chunked_logits(ours: TargetModel, prompts: list[Tensor]) -> list[Tensor]:
    """In one batch over paged KV, each prompt in two chunks."""
    lens = [len(prompt) for prompt in prompts]
    pages, middle = Pages(ours, len(prompts), 3), [n // 2 for n in lens]
    chunks = [pages.logits(prompts, [0] * len(lens), middle), pages.logits(prompts, middle, lens)]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


@torch.inference_mode()
@pytest.mark.parametrize("name", ALL)
def test_logits_and_texts_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Without speculation, with an EAGLE-3 head, n-grams, and the model itself as its draft."""
    theirs, ours = write(CASES[name], tmp_path), load(tmp_path)
    assert ours.config.has_family == CASES[name].has_family
    assert set(ours.config.media_token_ids) == set(CASES[name].media.values())
    drawn = torch.randint(1, 120, (3, 40), generator=torch.Generator().manual_seed(3))
    prompts = [row[: 12 * i + 5] for i, row in enumerate(drawn)]
    keeps_states = ours.config.recurrent is not None  # which `Pages` have not; texts are compared
    for prompt, logits in zip(prompts, () if keeps_states else chunked_logits(ours, prompts), strict=not keeps_states):
        torch.testing.assert_close(logits, theirs(prompt[None]).logits[0], atol=TOLERANCE, rtol=0)

    expected = generated(theirs, [prompt.tolist() for prompt in prompts], 16)
    requests = [request(i, prompt.tolist(), max_tokens=16, ignore_eos=True) for i, prompt in enumerate(prompts)]
    assert tokens_of(run(plain(ours), requests)) == expected
    drafts: list[tuple[Any, dict[str, Any]]] = [(random_head(ours, "EAGLE3"), {}), (None, NGRAM)]
    for draft, settings in (*drafts, *(() if keeps_states else ((DraftLM(ours), {}),))):
        engine = speculative(ours, draft, **settings)  # type: ignore[arg-type]
        assert tokens_of(run(engine, requests[:2], joining={3: requests[2:]})) == expected
        assert engine.stats().accepted_tokens > 0 or draft is None or not isinstance(draft, DraftLM)


class CountedReads:
    """`safe_open` of one file, with the keys whose data is read."""

    def __init__(self, path: Path, reads: set[str]) -> None:
        self.file, self.reads = safe_open(path, framework="pt"), reads
        self.keys = self.file.keys

    def get_tensor(self, key: str) -> Tensor:
        self.reads.add(key)
        return self.file.get_tensor(key)

    def get_slice(self, key: str) -> Any:
        whole, reads = self.file.get_slice(key), self.reads

        class Slice:
            get_shape = whole.get_shape

            def __getitem__(self, index: Any) -> Tensor:
                reads.add(key)
                return whole[index]  # type: ignore[no-any-return]

        return Slice()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    keys: set[str] = set()
    monkeypatch.setattr(weights, "safe_open", lambda path, framework: CountedReads(path, keys))
    return keys


@pytest.mark.parametrize("name", ALL)
def test_encoders_and_projectors_are_never_read(name: str, tmp_path: Path, reads: set[str]) -> None:
    write(CASES[name], tmp_path)
    stored = set(safe_open(tmp_path / "model.safetensors", framework="pt").keys())
    load(tmp_path)
    others = ("vision", "visual", "projector", "connector", "merger", "image_newline")
    decoder = {key for key in stored if not any(part in key for part in others)}
    assert reads == decoder < stored


OLD_AND_NEW = {  # a name in older files, and in those of transformers 5
    "gemma3": ("language_model.model.", "model.language_model."),
    "mistral-small": ("language_model.model.", "model.language_model."),
    "kimi-k2.5": ("language_model.model.", "model.language_model."),
    "qwen2.5-vl": ("model.", "model.language_model."),
    "qwen3-vl": ("language_model.model.", "model.language_model."),
}


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.deep,)) for n in OLD_AND_NEW]
)
def test_old_and_new_names_are_read(name: str, tmp_path: Path) -> None:
    write(CASES[name], tmp_path)
    prompt = [torch.arange(1, 20)]
    expected = chunked_logits(load(tmp_path), prompt)[0]

    def renamed(key: str, prefix: str) -> str:
        for start in ("language_model.model.", "model.language_model.", "model."):
            if key.startswith(start) and key.removeprefix(start).startswith(("layers", "embed", "norm")):
                return prefix + key.removeprefix(start)
        return key.replace("language_model.lm_head", "lm_head") if prefix.startswith("model.") else key

    for prefix in OLD_AND_NEW[name]:
        rename(tmp_path, lambda key, prefix=prefix: renamed(key, prefix))
        assert torch.equal(chunked_logits(load(tmp_path), prompt)[0], expected)


def test_an_older_config_without_text_config_means_the_same(tmp_path: Path) -> None:
    """Published Qwen2-VL and Qwen2.5-VL files have the decoder's keys at the top, and RoPE of the type mrope."""
    write(CASES["qwen2.5-vl"], tmp_path)
    expected, prompt = load(tmp_path), [torch.arange(1, 20)]
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **raw, "rope_theta": rope["rope_theta"], "rope_scaling": scaling, "torch_dtype": raw.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    found = load(tmp_path)
    assert found.config == expected.config
    assert torch.equal(chunked_logits(found, prompt)[0], chunked_logits(expected, prompt)[0])


def test_files_of_internvl_itself_mean_the_same(tmp_path: Path) -> None:
    """They have `llm_config`, names of their own outside the decoder, and code that is not run."""
    write(CASES["internvl"], tmp_path)
    expected, prompt = load(tmp_path), [torch.arange(1, 20)]
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"llm_config": raw.pop("text_config"), "model_type": "internvl_chat", "architectures": ["InternVLChatModel"]}
    del raw["image_token_id"]
    raw["auto_map"] = {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    others = {"vision_tower.": "vision_model.", "multi_modal_projector.": "mlp1."}
    rename(tmp_path, lambda key: next((to + key[len(of) :] for of, to in others.items() if key.startswith(of)), key))
    found = load(tmp_path)
    assert replace(expected.config, media_token_ids=()) == found.config
    assert torch.equal(chunked_logits(found, prompt)[0], chunked_logits(expected, prompt)[0])


@pytest.mark.parametrize("tied", ["top", "text"])
def test_a_tied_lm_head_may_be_declared_in_either_place(tmp_path: Path, tied: str) -> None:
    write(CASES["qwen2.5-vl"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["tie_word_embeddings"] = tied == "top"
    raw["text_config"]["tie_word_embeddings"] = tied == "text"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    file = tmp_path / "model.safetensors"
    kept = {key: tensor for key, tensor in weights.open_weights(tmp_path).items() if key != "lm_head.weight"}
    tensors = {key: stored.read().clone() for key, stored in kept.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert load(tmp_path).config.tie_word_embeddings


def test_a_published_head_fits_unchanged(tmp_path: Path) -> None:
    """An EAGLE-3 head's config.json may repeat the target's M-RoPE."""
    write(CASES["qwen2.5-vl"], tmp_path / "target")
    target = load(tmp_path / "target")
    head = random_head(target, "EAGLE3")
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "max_position_embeddings": 64,
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    save_checkpoint(head, tmp_path / "head", raw, torch.float32)
    loaded = load_draft(tmp_path / "head", target, Loading(context=CONTEXT, lookahead=MARGIN, progress=False))
    requests = [request(i, range(1 + i, 20), ignore_eos=True) for i in range(2)]
    texts = [tokens_of(run(engine, requests)) for engine in (plain(target), speculative(target, loaded))]
    assert texts[0] == texts[1]


def test_the_memory_estimate_counts_what_is_loaded(tmp_path: Path) -> None:
    write(CASES["qwen2.5-vl"], tmp_path)
    flags = ["--model-path", str(tmp_path), "--speculative-algorithm", "NONE", "--dtype", "float32"]
    target = load(tmp_path, pack=False)
    held = sum(view.nbytes for _, view in target.weight_views())
    assert memory_estimate(parse_args(flags, environ={}))["target_weights"] == held
    assert set(target.config.media_token_ids) == set(MEDIA.values())


def packed(
    directory: Path, config: dict[str, Any], store: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
) -> Any:
    """The decoder's linear layers as a quantizer stores them, in place; the model that they stand for."""
    file, path = directory / "model.safetensors", directory / "config.json"
    whole = load_file(file)
    stored, dense = dict(whole), dict(whole)
    for name, tensor in whole.items():
        if name.endswith("_proj.weight") and "layers" in name and "vis" not in name and tensor.dim() == 2:
            parts, dense[name] = store(name.removesuffix(".weight"), tensor)
            del stored[name]
            stored |= parts
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, file, metadata={"format": "pt"})
    expected = load(directory, pack=False)
    raw = json.loads(path.read_text())
    within = raw["text_config"] if raw["model_type"] == "kimi_k25" else raw
    within["quantization_config"] = config
    path.write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file, metadata={"format": "pt"})
    return expected


IGNORE = {"ignore": ["lm_head", "re:visual.*", "re:vision_tower.*", "re:multi_modal_projector.*"]}
PACKED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "compressed-tensors": ("mistral-small", compressed(8, "int", "channel") | IGNORE, as_int8),
    "compressed-tensors, int4": ("kimi-k2.5", compressed(4, "int", "group", group_size=32) | IGNORE, as_packed),
    "gptq": ("qwen2.5-vl", gptq(4, 32), as_gptq),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", PACKED)
def test_quantized_decoders_are_read_and_their_encoders_are_not(name: str, tmp_path: Path) -> None:
    """Kimi K2.5's experts are int4 in groups of 32, and its text_config says so; the others' config.json outside."""
    case, config, store = PACKED[name]
    write(
        CASES[case],
        tmp_path,
        **({"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16} if case == "kimi-k2.5" else {}),
    )
    expected, prompt = packed(tmp_path, config, store), [torch.arange(1, 20)]
    torch.testing.assert_close(
        chunked_logits(load(tmp_path, pack=False), prompt)[0], chunked_logits(expected, prompt)[0], atol=1e-4, rtol=0
    )
    served = load(tmp_path)
    requests = [request(i, range(1 + i, 20), ignore_eos=True) for i in range(2)]
    texts = [tokens_of(run(engine, requests)) for engine in (plain(served), speculative(served, None, **NGRAM))]  # type: ignore[arg-type]
    assert texts[0] == texts[1]


def test_wrappers_whose_decoder_is_not_served_give_its_reason(tmp_path: Path) -> None:
    raw = {
        "architectures": ["DeepseekVLForConditionalGeneration"],
        "model_type": "deepseek_vl",
        "text_config": {"model_type": "llama"},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="it reads more than text; the text of .*, gemma3, .* is served"):
        load(tmp_path)


def test_llama_4_is_served_within_its_chunk_and_no_further(tmp_path: Path) -> None:
    """There attention in chunks is full attention, and queries do not grow yet (from position floor_scale - 1 on)."""
    write(CASES["llama4"], tmp_path, attention_chunk_size=48, max_position_embeddings=4096)
    assert read_model_config(tmp_path).context_limit[0] == 48
    write(CASES["llama4"], tmp_path, attention_chunk_size=64, floor_scale=40, max_position_embeddings=4096)
    facts = read_model_config(tmp_path)
    assert facts.max_position == facts.context_limit[0] == 39
    config = parse_args(["--model-path", str(tmp_path), "--context-length", "40"], environ={})
    with pytest.raises(
        ConfigError, match=r"at most 39 \(attention_chunk_size: .*\); add --context-length 39, or drop it"
    ):
        context_length(config, facts)


@torch.inference_mode()
def test_llama_4_up_to_the_end_of_its_chunk_computes_what_transformers_does(tmp_path: Path) -> None:
    """Several prompts in one forward, which has more rows than a chunk."""
    theirs = write(CASES["llama4"], tmp_path, attention_chunk_size=48, floor_scale=49)
    ours = load_target(tmp_path, Loading(progress=False), dtype="float32")
    prompts = list(torch.randint(1, 120, (3, 48), generator=torch.Generator().manual_seed(3)))
    for prompt, logits in zip(prompts, chunked_logits(ours, prompts), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(logits, theirs(prompt[None]).logits[0], atol=TOLERANCE, rtol=0)


def test_a_vision_checkpoint_is_served_with_its_own_files(tmp_path: Path) -> None:
    """Processors keep the template in chat_template.json, the ends of turns stand in generation_config.json."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|image_pad|>", "<|vision_pad|>"])
    size = tokenizer.get_vocab_size()
    image = MEDIA | {"image_token_id": tokenizer.token_to_id("<|image_pad|>")}
    write(replace(CASES["qwen2.5-vl"], media=image), tmp_path, vocab_size=size + 3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}A:"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    llm = LLM(str(tmp_path), speculative_algorithm="NGRAM", max_total_tokens=1024, dtype="float32", progress=False)
    assert llm._engine.ready().eos_token_ids == (0, 5, 6)
    [answer] = llm.chat([{"role": "user", "content": "hi"}], max_tokens=4, use_tqdm=False)
    assert answer.prompt_token_ids == tokenizer.encode("user: hi\nA:").ids
    for token in ("<|image_pad|>", "<|vision_pad|>"):  # by config.json, and by its spelling
        with pytest.raises(ValueError, match="stands for an image, video or audio; this server reads text only"):
            llm.generate(f"a {token} b", max_tokens=4, use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "together"), [("qwen3.5", False), ("qwen3.5-moe", True), pytest.param("qwen3.5-moe", False, marks=DEEP)]
)
def test_an_mtp_layer_beside_the_decoder_drafts(name: str, together: bool, tmp_path: Path) -> None:
    """`mtp.*` stands outside of the decoder's prefix. Experts are stored one by one, or together as in published files.

    Texts are those of transformers' whole model.
    """
    theirs = write(CASES[name], tmp_path, layer_types=["linear_attention", "linear_attention", "full_attention"])
    decoder = AutoModelForCausalLM.from_config(theirs.config.text_config, attn_implementation="eager")
    decoder.model, decoder.lm_head = theirs.model.language_model, theirs.lm_head
    mtp = mtp_of(decoder)
    save_beside(mtp, tmp_path, "qwen")
    if together:
        join_experts(tmp_path)
    check_greedy_chain(tmp_path, decoder, mtp)
    prompts = torch.randint(1, 120, (3, 20), generator=torch.Generator().manual_seed(3)).tolist()
    target, how = load(tmp_path), Loading(context=CONTEXT, lookahead=MARGIN, progress=False)
    head: Any = load_draft(tmp_path, target, how, algorithm="NEXTN", target_path=tmp_path)
    requests = [request(i, prompt, max_tokens=16, ignore_eos=True) for i, prompt in enumerate(prompts)]
    assert tokens_of(run(speculative(target, head), requests)) == generated(theirs, prompts, 16)


def join_experts(directory: Path) -> None:
    """Store experts together: gate_up_proj [experts, 2 * width, hidden] and down_proj [experts, hidden, width]."""
    file = directory / "model.safetensors"
    tensors, kinds = load_file(file), ("gate_proj", "up_proj", "down_proj")
    for first in [key for key in tensors if key.endswith(".experts.0.gate_proj.weight")]:
        prefix = first.removesuffix(".0.gate_proj.weight")
        count = sum(key.startswith(prefix) for key in tensors) // len(kinds)
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{expert}.{kind}.weight") for expert in range(count)]) for kind in kinds
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
    save_file(tensors, file, metadata={"format": "pt"})
